"""The build command refuses what is wrong with a checkpoint in one line, which names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import (
    DEMO,
    DEMO_VOCAB,
    edit_config,
    edit_tensors,
    random_checkpoint,
    tiny_config,
    write_target,
    write_tokenizer,
)
from trtree.build.text_files import check_tokenizer
from trtree.runtime.session import Session


def test_missing_shard(refused: Callable[..., str], target: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (target / "model.safetensors").unlink()
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002.safetensors" in refused("--checkpoint", target)


def test_truncated_shard(refused: Callable[..., str], target: Path) -> None:
    shard = target / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert "model.safetensors" in refused("--checkpoint", target)


def test_missing_tensor(refused: Callable[..., str], target: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    edit_tensors(target, lambda tensors: tensors.pop(name))
    assert name in refused("--checkpoint", target)


def test_a_tensor_no_network_uses(refused: Callable[..., str], target: Path) -> None:
    extra = {"model.layers.9.mlp.gate_proj.weight": torch.zeros(4, 4)}
    edit_tensors(target, lambda tensors: tensors.update(extra))
    assert "model.layers.9.mlp.gate_proj.weight" in refused("--checkpoint", target)


def test_wrong_scale_shape(refused: Callable[..., str], target: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"
    edit_tensors(target, lambda tensors: tensors.update({name: tensors[name][:, :8].contiguous()}))
    line = refused("--checkpoint", target)
    assert name in line
    assert "[384, 8]" in line
    assert "[384, 16]" in line


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_bad_block_scale(refused: Callable[..., str], target: Path, value: float) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        scale = tensors[name].float()
        scale[3, 5] = value
        tensors[name] = scale.to(torch.float8_e4m3fn)

    edit_tensors(target, spoil)
    assert name in refused("--checkpoint", target)


def test_a_vector_of_integers(refused: Callable[..., str], target: Path) -> None:
    name = "model.norm.weight"
    edit_tensors(target, lambda tensors: tensors.update({name: tensors[name].int()}))
    line = refused("--checkpoint", target)
    assert f"{name} is int32, expected bfloat16, float16, float32" in line


def test_pickle_file(refused: Callable[..., str], target: Path) -> None:
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    line = refused("--checkpoint", target)
    assert "pytorch_model.bin" in line
    assert "safetensors" in line


def test_drafter_of_another_hidden_size(refused: Callable[..., str], tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=6, vocab_size=DEMO_VOCAB)
    line = refused("--checkpoint", plain_target(tmp_path, config), "--drafter", DEMO / "drafter")
    assert "hidden_size is 256" in line
    assert "64" in line


def plain_target(tmp_path: Path, config: dict[str, Any]) -> Path:
    """A bf16 target with weights of zeros and ones."""
    h, ffn = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": torch.zeros(config["vocab_size"], h)}
    tensors["lm_head.weight"] = torch.zeros(config["vocab_size"], h)
    tensors["model.norm.weight"] = torch.ones(h)
    for i in range(config["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (config["head_dim"],),
            "self_attn.k_norm": (config["head_dim"],),
            "mlp.gate_proj": (ffn, h),
            "mlp.up_proj": (ffn, h),
            "mlp.down_proj": (h, ffn),
        }
        for module, shape in shapes.items():
            tensors[f"model.layers.{i}.{module}.weight"] = torch.ones(shape)
    bf16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return write_target(tmp_path / "plain_target", bf16, config)


def test_unknown_architecture(refused: Callable[..., str], target: Path) -> None:
    edit_config(target, architectures=["MambaForCausalLM"])
    line = refused("--checkpoint", target)
    assert "MambaForCausalLM" in line
    assert "Qwen3ForCausalLM" in line


def test_config_that_contradicts_the_weights(refused: Callable[..., str], target: Path) -> None:
    edit_config(target, intermediate_size=800)
    line = refused("--checkpoint", target)
    assert "model.layers.0.mlp.gate_proj" in line
    assert "[384, 256]" in line
    assert "[800, 256]" in line


def test_hub_id(refused: Callable[..., str]) -> None:
    line = refused("--checkpoint", "Qwen/Qwen3-8B")
    assert "hf download Qwen/Qwen3-8B" in line


def test_missing_tokenizer(refused: Callable[..., str], target: Path) -> None:
    (target / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refused("--checkpoint", target)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("tokenizer.json", "", "not a tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("generation_config.json", "", "not valid JSON"),
        ("generation_config.json", "[0]", "expected a JSON object"),
        ("generation_config.json", f'{{"eos_token_id": {DEMO_VOCAB}}}', f"vocab_size {DEMO_VOCAB}"),
    ],
)
def test_bad_text_file(
    refused: Callable[..., str], target: Path, name: str, content: str, part: str
) -> None:
    (target / name).write_text(content)
    line = refused("--checkpoint", target)
    assert name in line
    assert part in line


def test_tokenizer_with_more_tokens_than_the_model(
    refused: Callable[..., str], target: Path
) -> None:
    write_tokenizer(target, DEMO_VOCAB + 1)
    line = refused("--checkpoint", target)
    assert f"token id {DEMO_VOCAB} is outside the model's vocab_size {DEMO_VOCAB}" in line


def test_tokenizer_with_far_fewer_tokens_is_a_warning(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_tokenizer(target, DEMO_VOCAB)
    assert not caplog.records
    check_tokenizer(target, 200_000)
    assert f"{DEMO_VOCAB} tokens, the model's vocab_size is 200000" in caplog.text


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None}])
def test_stop_ids_come_from_config_json(
    run: Callable[..., int], target: Path, tmp_path: Path, generation: dict[str, Any] | None
) -> None:
    file = target / "generation_config.json"
    file.unlink() if generation is None else file.write_text(json.dumps(generation))
    edit_config(target, eos_token_id=[5, 7])
    assert run("--checkpoint", target, "--output", "engine") == 0
    assert Session(tmp_path / "engine").stop_token_ids == [5, 7]


@pytest.mark.parametrize("stop", ["0", 1.5, True, [[1]], {}, 10**12, -1, [0, None]])
def test_bad_stop_ids(refused: Callable[..., str], target: Path, stop: Any) -> None:
    (target / "generation_config.json").unlink()
    edit_config(target, eos_token_id=stop)
    line = refused("--checkpoint", target)
    assert "config.json: eos_token_id must be a token id" in line
    assert repr(stop) in line


def test_attention_bias_must_agree_with_the_tensors(
    refused: Callable[..., str], target: Path
) -> None:
    edit_config(target, attention_bias=True)
    assert "self_attn.q_proj.bias is missing" in refused("--checkpoint", target)


def test_biases_that_no_config_asks_for(refused: Callable[..., str], target: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.bias"
    edit_tensors(target, lambda tensors: tensors.update({name: torch.zeros(256).bfloat16()}))
    assert f"{name} is there, but config.json" in refused("--checkpoint", target)


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_activations_that_the_checkpoint_has_no_scales_for(
    refused: Callable[..., str], tmp_path: Path, plan: list[str]
) -> None:
    checkpoint = random_checkpoint(tmp_path / "w4a16", tiny_config(), algorithm="W4A16_NVFP4")
    line = refused("--checkpoint", checkpoint, "--activations", "nvfp4", *plan)
    assert "W4A16_NVFP4" in line
    assert "has no input_scale for NVFP4; use --activations bf16" in line


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_activations_where_nothing_is_rounded(
    refused: Callable[..., str],
    run: Callable[..., int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    plan: list[str],
) -> None:
    checkpoint = random_checkpoint(tmp_path / "plain", tiny_config())
    line = refused("--checkpoint", checkpoint, "--activations", "nvfp4", *plan)
    assert f"activations nvfp4: no linear of {checkpoint} is NVFP4" in line
    assert run("--checkpoint", checkpoint, "--activations", "bf16", *plan) == 0
    assert f"activations bf16: no linear of {checkpoint} is NVFP4: the option has no" in caplog.text


def test_a_plan_of_widths_that_nvfp4_does_not_have(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(tmp_path / "nvfp4", tiny_config(), algorithm="NVFP4")
    edit_config(checkpoint, intermediate_size=100)
    line = refused("--checkpoint", checkpoint, "--plan")
    assert "mlp.down_proj would be NVFP4 of 100 in_features, which are no multiple of 16" in line
