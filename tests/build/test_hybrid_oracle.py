"""The hybrid families against transformers' classes, in float32, and what they refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import ROOT, write_target
from oracle import check_logits, reference_engine
from random_hybrid import hybrid_config, random_hybrid, transformers_model
from trtree.build import builder
from trtree.build.builder import manifest_of
from trtree.build.checkpoint import CheckpointError
from trtree.build.models import family_of
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions
from trtree.build.plan import memory_plan

NEXT, DENSE, MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
CASES = {
    "next": hybrid_config(NEXT),
    "next-equal-heads": hybrid_config(NEXT, linear_num_key_heads=4),
    "next-not-normalized": hybrid_config(NEXT, norm_topk_prob=False),
    "next-dense-layer": hybrid_config(NEXT, mlp_only_layers=[0]),
    "next-kernel-2": hybrid_config(NEXT, linear_conv_kernel_dim=2),
    "3.5": hybrid_config(DENSE),
    "3.5-tied-three-layers": hybrid_config(DENSE, tie_word_embeddings=True, num_hidden_layers=3),
    "3.5-one-key-head": hybrid_config(DENSE, linear_num_key_heads=1),
    "3.5-moe": hybrid_config(MOE),
}


@pytest.mark.parametrize("case", CASES)
def test_target_against_transformers(tmp_path: Path, case: str) -> None:
    config = CASES[case]
    tensors = random_hybrid(config, dtype=torch.float32)
    model = transformers_model(config, tensors)
    check_logits(reference_engine(tmp_path, config, tensors), model, chunks=(40, 4))


def multimodal(text: dict[str, Any]) -> dict[str, Any]:
    """config.json of the multimodal model around a text model."""
    name = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": [name],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": inner,
        "vision_config": {"depth": 1, "hidden_size": 8},
        "image_token_id": 70,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


@pytest.mark.parametrize("architecture", [DENSE, MOE])
def test_the_text_part_of_a_multimodal_checkpoint(
    tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same network as the text model's, vision and prediction layers left out by name."""
    text = hybrid_config(architecture)
    tensors = random_hybrid(text, dtype=torch.bfloat16)
    outer = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    outer["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(24, 8, dtype=torch.bfloat16)
    outer["mtp.layers.0.mlp.up_proj.weight"] = torch.zeros(8, 8, dtype=torch.bfloat16)
    config = multimodal(text)
    caplog.set_level("INFO")
    networks = {}
    for name, weights, file in (("text", tensors, text), ("both", outer, config)):
        checkpoint = tmp_path / name
        write_target(checkpoint, weights, file | {"vocab_size": 80})
        (checkpoint / "config.json").write_text(json.dumps(file))
        options = BuildOptions(checkpoint=checkpoint, output=tmp_path / f"{name}.engine")
        description = builder.describe(options)
        networks[name] = description.networks["target"].to_dict()
    assert networks["text"] == networks["both"]
    assert "model.visual.*: 1 tensors of the vision model are left out" in caplog.text
    assert "mtp.*: 1 tensors of a prediction layer are left out" in caplog.text


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (hybrid_config(DENSE, linear_num_key_heads=3), "linear_num_value_heads 4 is no multiple"),
        (hybrid_config(DENSE, linear_conv_kernel_dim=1), "linear_conv_kernel_dim 1 is not"),
        (hybrid_config(DENSE, linear_key_head_dim=None), "linear_key_head_dim is missing"),
        (hybrid_config(DENSE, layer_types=["linear_attention"]), "layer_types must name 2 layers"),
        (hybrid_config(DENSE, layer_types=["mamba", "full_attention"]), "not ['mamba'"),
        (hybrid_config(MOE, num_experts_per_tok=9), "top_k 9 of 8 candidate experts"),
        (hybrid_config(NEXT, shared_expert_intermediate_size=0), "shared_expert_intermediate_size"),
        (hybrid_config(DENSE, attn_output_gate=False), "attn_output_gate False is not supported"),
        (hybrid_config(DENSE, output_gate_type="sigmoid"), "output_gate_type 'sigmoid' is not"),
        (hybrid_config(NEXT, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_config_json_cannot_say(config: dict[str, Any], part: str) -> None:
    with pytest.raises(NetworkError) as caught:
        family_of(config).parse(config)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_embeddings_tied_in_one_place_only_are_refused(tmp_path: Path) -> None:
    config = multimodal(hybrid_config(DENSE)) | {"tie_word_embeddings": True, "vocab_size": 80}
    checkpoint = write_target(tmp_path / "c", {"x": torch.zeros(1)}, config)
    options = BuildOptions(checkpoint=checkpoint, output=tmp_path / "engine")
    with pytest.raises(CheckpointError, match="tie_word_embeddings is True, but False in text"):
        builder.describe(options)


def test_the_plan_of_a_public_model_and_its_drafter() -> None:
    models = ROOT / "configs" / "models"
    options = BuildOptions(
        checkpoint=models / "qwen3.6_27b_nvfp4",
        drafter=models / "qwen3.6_27b_dflash",
        backend="cpu",
        max_batch_size=4,
    )
    description = builder.plan(options)
    assert description.drafter is not None
    assert description.drafter.mask_token_id == 248070
    assert description.drafter.causal == (True, True, True, True, False)
    states = description.networks["target"].states.values()
    assert sum(state.kind == "recurrent" for state in states) == 48
    assert sum(state.kind == "kv" for state in states) == 16
    # 48 value heads of 128 x 128, and windows of 3 x 10,240 channels, in each of 48 layers.
    per_request = 4 * 48 * (48 * 128 * 128 + 3 * 10240)
    assert manifest_of(description)["build_config"]["request_state_bytes"] == per_request
    assert dict(memory_plan(description))["recurrent state, 4 x 149.62 MiB"]


@pytest.mark.parametrize(
    ("target", "drafter", "mask_token", "slides", "billions"),
    [
        ("qwen3.6_27b_nvfp4", "qwen3.6_27b_dflash", 248070, 4, 26.9),
        ("qwen3.6_35b_a3b_nvfp4", "qwen3.6_35b_a3b_dflash", 248077, 5, 34.7),
        ("qwen3_next_80b_a3b_nvfp4", None, None, 0, 79.7),
        *(
            pytest.param(*public, marks=pytest.mark.full)
            for public in (
                ("qwen3.6_35b_a3b_nvfp4", "qwen3.5_35b_a3b_dflash", 248070, 0, 34.7),
                ("qwen3.5_122b_a10b_nvfp4", "qwen3.5_122b_a10b_dflash", 248077, 5, 122.1),
                ("qwen3.5_397b_a17b_nvfp4", None, None, 0, 396.3),
            )
        ),
    ],
)
def test_public_models_are_as_large_as_their_names_say(
    target: str, drafter: str | None, mask_token: int | None, slides: int, billions: float
) -> None:
    """Parameters of the text part, prediction layer left out."""
    models = ROOT / "configs" / "models"
    options = BuildOptions(checkpoint=models / target, drafter=drafter and models / drafter)
    description = builder.plan(options)
    weights = [w for w in description.weights.stored.values() if w.owner == "target"]
    assert sum(math.prod(w.shape) for w in weights) / 1e9 == pytest.approx(billions, rel=1e-2)
    states = description.networks["target"].states.values()
    kinds = [state.kind for state in states]
    assert kinds.count("recurrent") == kinds.count("conv") == 3 * kinds.count("kv")
    if description.drafter:
        assert description.drafter.mask_token_id == mask_token
        assert sum(description.drafter.causal) == slides
        assert description.block_size == 16
