"""Inspecting checkpoints, those that cannot be built included."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import DEMO, ROOT, random_checkpoint, tiny_config, write_target
from random_glm5 import glm5_config
from random_moe import glm4_moe_config, random_moe
from trtree.build import builder
from trtree.build.checkpoint import CheckpointError, QuantizationConfig
from trtree.build.checkpoint.write import quantize_state_dict, write_checkpoint
from trtree.build.inspection import inspect
from trtree.build.layers import Layers
from trtree.build.models import FAMILIES, family_of
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions
from trtree.build.plan import kv_bytes_per_token, memory_plan
from trtree.build.text_files import size_text

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Next": ("Qwen3NextConfig", {**GROUPED, **EXPERTS, **DELTA_NET}),
    "Qwen3_5": ("Qwen3_5TextConfig", {**GROUPED, **DELTA_NET}),
    "GlmMoeDsa": (
        "GlmMoeDsaConfig",
        {
            **LATENT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A random checkpoint of an architecture by its transformers class, and the model."""
    made: dict[str, tuple[Path, Any]] = {}

    def write(name: str) -> tuple[Path, Any]:
        import transformers

        if name not in made:
            config_class, fields = MODELS[name]
            config = getattr(transformers, config_class)(**SIZES, **fields)
            model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
            path = tmp_path_factory.mktemp(name) / "model"
            config_json = config.to_dict() | {"architectures": [f"{name}ForCausalLM"]}
            write_checkpoint(path, model.state_dict().items(), config_json)
            made[name] = path, model
        return made[name]

    return write


@pytest.mark.parametrize(
    ("name", "layers", "mlps"),
    [
        ("Qwen3Next", "3 linear_attention, 1 full_attention", "4 of 4 experts (2 used)"),
        ("Qwen3_5", "3 linear_attention, 1 full_attention", "4 dense"),
        ("GlmMoeDsa", "4 deepseek_sparse_attention", "1 dense, 3 of 4 experts (2 used)"),
    ],
)
def test_architectures_that_cannot_be_built_are_described(
    written: Callable[[str], tuple[Path, Any]], name: str, layers: str, mlps: str
) -> None:
    path, model = written(name)
    found = inspect(path)
    facts = dict(found.facts)
    assert found.problems == []
    assert facts["layers"] == layers and facts["feed-forward"] == mlps
    elements = sum(p.numel() for p in model.state_dict().values())
    stored = sum(int(count) for _, count, *_ in found.groups)
    assert stored > 20 and size_text(2 * elements) in facts["tensors"]
    if f"{name}ForCausalLM" in FAMILIES:
        return
    assert f"{name}ForCausalLM: cannot be built" in facts["family"]
    with pytest.raises(NetworkError, match=f"'{name}ForCausalLM' is not supported; supported: "):
        family_of({"architectures": [f"{name}ForCausalLM"]})


def test_glm5_counts_indexer_keys_where_there_are_any(tmp_path: Path) -> None:
    config = glm5_config(num_hidden_layers=3, indexer_types=["full", "shared", "shared"])
    found = inspect(random_checkpoint(tmp_path / "glm5", config, algorithm="NVFP4"))
    facts = dict(found.facts)
    assert found.problems == []
    assert facts["family"] == "GlmMoeDsaForCausalLM: can be built"
    assert facts["coverage"].startswith("all ")
    assert facts["indexers"] == "1 layers choose keys, 2 share"
    assert facts["KV per token"] == f"{3 * 48 + 32} elements, 0.3 KiB in bf16"


@pytest.mark.parametrize("size", ["5", "5.2"])
def test_glm5_is_planned_from_its_configuration(size: str) -> None:
    """A token keeps 512 + 64 numbers per layer, and 128 where a layer chooses keys."""
    options = BuildOptions(checkpoint=ROOT / "configs" / "models" / f"glm_{size}_nvfp4", tp=8)
    description = builder.plan(options)
    rows = dict(memory_plan(description))
    indexers = {"5": 78, "5.2": 21}[size]
    latents, keys = size_text(4 * 78 * 576), size_text(4 * indexers * 128)
    assert rows["a token keeps"] == (
        f"{latents} of latents and {keys} of indexer keys, whole on every rank"
    )
    assert kv_bytes_per_token(description) == 4 * (78 * 576 + indexers * 128)


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5"])
def test_recurrent_state_is_what_transformers_keeps(
    written: Callable[[str], tuple[Path, Any]], name: str
) -> None:
    _, model = written(name)
    layers = Layers.of(model.config.to_dict())
    assert layers is not None
    with torch.no_grad():
        cache = model(torch.arange(8)[None], use_cache=True).past_key_values
    recurrent, window = ((shape, count) for _, shape, count in layers.states)
    states = [
        layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")
    ]
    states = [s[0] if isinstance(s, list | tuple | dict) else s for s in states]
    assert len(states) == recurrent[1] == window[1] == 3
    assert all(tuple(state.shape[1:]) == recurrent[0] for state in states)
    keys = [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None]
    attended = [k for k in keys if k.dim() == 4]
    assert layers.kv_elements == sum(2 * k[0, :, 0].numel() for k in attended) == 64


def test_layers_are_derived_where_no_list_names_them() -> None:
    fields = {**SIZES, **GROUPED, **DELTA_NET, "linear_conv_kernel_dim": 4}
    found = Layers.of({"text_config": fields | {"num_hidden_layers": 8}})
    assert found is not None
    assert found.kinds == {"linear_attention": 6, "full_attention": 2}
    assert found.states[1][1] == (2 * 2 * 16 + 4 * 8, 3)
    assert Layers.of({}) is None


def test_a_number_of_layers_that_cannot_be_is_not_listed() -> None:
    assert Layers.of({"num_hidden_layers": 10**12}) is None


def test_a_checkpoint_that_can_be_built_is_covered() -> None:
    facts = dict(inspect(DEMO / "target_nvfp4").facts)
    assert facts["family"] == "Qwen3ForCausalLM: can be built"
    assert facts["coverage"] == "all 194 tensors are used"
    groups = {row[0]: row[1:4] for row in inspect(DEMO / "target_nvfp4").groups}
    assert groups["model.layers.*.mlp.up_proj"] == ("6", "NVFP4", "[384, 256]")
    assert groups["model.norm"] == ("1", "bfloat16", "[256]")


def test_a_drafter_is_described() -> None:
    facts = dict(inspect(DEMO / "drafter").facts)
    assert facts["family"] == "DFlashDraftModel: a DFlash drafter, block size 8"
    assert facts["target layers"] == "1, 2, 3, 4 (from 0; the file counts L)"


def test_every_problem_is_listed(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path / "model", tiny_config(), algorithm="NVFP4")
    tensors = load_file(path / "model.safetensors")
    q, up = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    del tensors[f"{q}.weight_scale_2"]
    tensors[f"{up}.weight_scale"] = tensors[f"{up}.weight_scale"][:, :2].contiguous()
    tensors["stray"] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors")
    problems = inspect(path).problems
    assert any(f"no tensor {q}.weight_scale_2" in line for line in problems)
    assert any(
        f"{up}.weight_scale has shape [96, 2], expected [96, 4]" in line for line in problems
    )
    assert len(problems) == 3  # and what stops the family's own description


@pytest.mark.parametrize(
    ("name", "family", "layers"),
    [
        ("glm_4.7_nvfp4", "Glm4MoeForCausalLM: can be built", "92 full_attention"),
        (
            "qwen3.6_27b_nvfp4",
            "Qwen3_5ForConditionalGeneration: can be built",
            "48 linear_attention, 16 full_attention",
        ),
        ("glm_5.2_dflash", "DFlashDraftModel: a DFlash drafter, block size 16", "5 full_attention"),
    ],
)
def test_configuration_files_are_described_without_weights(
    name: str, family: str, layers: str
) -> None:
    found = inspect(ROOT / "configs" / "models" / name)
    facts = dict(found.facts)
    assert (facts["family"], facts["layers"]) == (family, layers)
    assert facts["quantization"].startswith("none" if "dflash" in name else "NVFP4")
    (problem,) = found.problems
    assert "has no model.safetensors" in problem and "--plan" in problem


def test_a_configuration_that_cannot_be_is_named_without_weights(tmp_path: Path) -> None:
    for name, fields in (
        ("unknown", {"architectures": ["NoneSuch"], "num_hidden_layers": 3}),
        ("bad", tiny_config(num_attention_heads=3)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    assert "NoneSuch: cannot be built" in dict(inspect(tmp_path / "unknown").facts)["family"]
    problems = inspect(tmp_path / "bad").problems
    assert len(problems) == 2 and "3 query heads of 16 over 2 KV heads" in problems[0]


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        inspect(tmp_path)


def test_a_prediction_layer_left_unquantized_is_no_problem(tmp_path: Path) -> None:
    """GLM's exporters leave it alone and list it nowhere; builds leave it out."""
    config = glm4_moe_config()
    excluded = ("lm_head", "model.embed_tokens", "*.mlp.gate")
    plain = random_moe(config, dtype=torch.bfloat16)
    tensors = dict(quantize_state_dict(plain.items(), exclude=excluded))
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"] = torch.zeros(48, 64).bfloat16()
    write_target(tmp_path / "glm", tensors, config, QuantizationConfig("NVFP4", excluded))
    found = inspect(tmp_path / "glm")
    assert found.problems == []
    facts = dict(found.facts)
    assert facts["left out"] == "1 tensors of prediction layers or vision"
    assert facts["feed-forward"] == "1 dense, 1 of 8 experts (3 used)"
    assert facts["coverage"].startswith("all ")


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": ["a"]},
        {"num_key_value_heads": "NVFP4"},
        {"num_attention_heads": 0},
        {"num_experts": 4, "mlp_only_layers": 0.5},
        {"num_experts": 4, "decoder_sparse_step": "x", "first_k_dense_replace": []},
        {"linear_num_value_heads": 4, "full_attention_interval": 0},
        {"architectures": 3},
    ],
)
def test_fields_of_other_types_say_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Layers are shown as far as they can be; what is wrong with a field, its family says."""
    config = tiny_config() | changes
    path = write_target(tmp_path / "odd", {"model.norm.weight": torch.ones(4)}, config)
    found = inspect(path)
    assert Layers.of(config) is not None
    assert any(fact[0] == "layers" for fact in found.facts)
