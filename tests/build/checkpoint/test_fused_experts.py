"""Experts stored as one tensor per layer read as one linear per expert."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.plugins.nvfp4_linear import format as nvfp4

StateDict = dict[str, torch.Tensor]
Open = Callable[..., Checkpoint]

EXPERTS = "model.layers.0.mlp.experts"
COUNT, HIDDEN, FFN = 3, 32, 48
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "moe_intermediate_size": FFN,
}


def dense_experts() -> StateDict:
    generator = torch.Generator().manual_seed(0)
    return {
        "gate_up_proj": torch.randn(COUNT, 2 * FFN, HIDDEN, generator=generator).bfloat16(),
        "down_proj": torch.randn(COUNT, HIDDEN, FFN, generator=generator).bfloat16(),
    }


def parts_of(experts: StateDict, i: int) -> StateDict:
    """One expert's linears, cut by hand."""
    gate_up = experts["gate_up_proj"][i]
    return {
        "gate_proj": gate_up[:FFN],
        "up_proj": gate_up[FFN:],
        "down_proj": experts["down_proj"][i],
    }


def quantized_experts(experts: StateDict, *, per_expert: bool) -> StateDict:
    """ModelOpt's names: the scales stand beside the tensor, not below it."""
    tensors: StateDict = {}
    for leaf, weight in experts.items():
        amax = weight.abs().amax(dim=(1, 2)).float() / (6 * 448)
        scales = amax if per_expert else amax.max().expand(COUNT)
        done = [nvfp4.quantize_weight(w, s) for w, s in zip(weight, scales, strict=True)]
        stem = f"{EXPERTS}.{leaf}"
        tensors[stem] = torch.stack([d.codes for d in done])
        raw = torch.stack([d.block_scale.view(torch.uint8) for d in done])
        tensors[f"{stem}_weight_scale"] = raw.view(torch.float8_e4m3fn)
        tensors[f"{stem}_weight_scale_2"] = scales.clone() if per_expert else scales[0].clone()
        tensors[f"{stem}_input_scale"] = torch.tensor([0.01])
    return tensors


def test_plain_experts(open_tensors: Open) -> None:
    experts = dense_experts()
    stored = {f"{EXPERTS}.{leaf}": tensor for leaf, tensor in experts.items()}
    checkpoint = open_tensors(stored, algorithm=None, config=CONFIG)
    for i in range(COUNT):
        for leaf, expected in parts_of(experts, i).items():
            module = f"{EXPERTS}.{i}.{leaf}"
            assert checkpoint.linear_info(module).out_features == len(expected)
            loaded = checkpoint.linear([module]).weight
            assert isinstance(loaded, torch.Tensor) and torch.equal(loaded, expected)
    checkpoint.check_coverage({n.removesuffix(".weight") for n in checkpoint.names()})
    with pytest.raises(CheckpointError, match=f"{EXPERTS}.{COUNT}.up_proj"):
        checkpoint.linear_info(f"{EXPERTS}.{COUNT}.up_proj")


@pytest.mark.parametrize("per_expert", [False, True])
def test_nvfp4_experts(open_tensors: Open, per_expert: bool) -> None:
    experts = dense_experts()
    checkpoint = open_tensors(quantized_experts(experts, per_expert=per_expert), config=CONFIG)
    globals_ = set()
    for i in range(COUNT):
        for leaf, weight in parts_of(experts, i).items():
            loaded = checkpoint.linear([f"{EXPERTS}.{i}.{leaf}"])
            assert isinstance(loaded.weight, nvfp4.QuantizedTensor)
            expected = nvfp4.quantize_weight(weight, loaded.weight.global_scale)
            assert torch.equal(nvfp4.dequantize(loaded.weight), nvfp4.dequantize(expected))
            assert loaded.input_scale == torch.tensor(0.01)
            globals_.add(loaded.weight.global_scale.item())
    assert len(globals_) == (2 * COUNT if per_expert else 2)


def test_both_forms_read_alike(open_tensors: Open) -> None:
    experts = dense_experts()
    single = {
        f"{EXPERTS}.{i}.{leaf}.weight": tensor.contiguous()
        for i in range(COUNT)
        for leaf, tensor in parts_of(experts, i).items()
    }
    checkpoint = open_tensors(single, algorithm=None, config=CONFIG)
    fused = [f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.1.up_proj"]
    loaded = checkpoint.linear(fused).weight
    assert isinstance(loaded, torch.Tensor)
    assert torch.equal(loaded, experts["gate_up_proj"][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate_up_proj": torch.zeros(COUNT, HIDDEN, 2 * FFN).bfloat16()},
            r"gate_up_proj has shape \[3, 32, 96\], .* \[experts, 96, 32\]; .*out_features\] is",
        ),
        (
            {"down_proj": torch.zeros(COUNT, HIDDEN, FFN // 2).bfloat16()},
            r"down_proj has shape \[3, 32, 24\], config.json implies \[experts, 32, 48\]$",
        ),
    ],
)
def test_other_layouts_are_refused(open_tensors: Open, changes: StateDict, message: str) -> None:
    stored = {f"{EXPERTS}.{leaf}": t for leaf, t in {**dense_experts(), **changes}.items()}
    with pytest.raises(CheckpointError, match=message):
        open_tensors(stored, algorithm=None, config=CONFIG)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_scale", torch.ones(COUNT, 48, 2), r"_weight_scale.*\[48, 2\]|has shape"),
        ("weight_scale", torch.ones(2, 2 * FFN, 2), "expected one matrix or number for each of 3"),
        ("weight_scale_2", torch.ones(2), "expected one matrix or number for each of 3"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    open_tensors: Open, part: str, value: torch.Tensor, message: str
) -> None:
    tensors = quantized_experts(dense_experts(), per_expert=False)
    name = f"{EXPERTS}.gate_up_proj_{part}"
    tensors[name] = value.to(tensors[name].dtype)
    with pytest.raises(CheckpointError, match=message):
        open_tensors(tensors, config=CONFIG)


def test_experts_left_unquantized_are_refused(open_tensors: Open, dense: StateDict) -> None:
    stored: dict[str, Any] = {f"{EXPERTS}.{leaf}": t for leaf, t in dense_experts().items()}
    with pytest.raises(CheckpointError, match=f"{EXPERTS}.0.down_proj is NVFP4; it was left unq"):
        open_tensors(stored, config=CONFIG)
    for exclusion in (EXPERTS, f"{EXPERTS}*"):
        both = ("lm_head", exclusion)
        open_tensors(stored, config=CONFIG, exclude=both, directory=f"with{len(exclusion)}")
