"""Plain checkpoints quantized as they are read."""

from collections.abc import Callable

import pytest
import torch

from trtree.build.checkpoint import Checkpoint, CheckpointError, QuantizedCheckpoint
from trtree.build.checkpoint import quantized as quantized_module
from trtree.plugins.nvfp4_linear import format as nvfp4

StateDict = dict[str, torch.Tensor]
Open = Callable[..., Checkpoint]

ATTENTION = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
Q, K, V = ATTENTION
ROUTER = "model.layers.0.mlp.gate"


@pytest.fixture
def plain(open_tensors: Open, dense: StateDict) -> Checkpoint:
    dense[f"{Q}.bias"] = torch.arange(64).bfloat16()
    dense[f"{ROUTER}.weight"] = torch.ones(4, 32).bfloat16()
    return open_tensors(dense, algorithm=None)


def weight_of(checkpoint: Checkpoint, modules: list[str]) -> nvfp4.QuantizedTensor:
    weight = checkpoint.linear(modules).weight
    assert isinstance(weight, nvfp4.QuantizedTensor)
    return weight


def same(ours: nvfp4.QuantizedTensor, theirs: nvfp4.QuantizedTensor) -> bool:
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


def test_fused_linears_are_rounded_as_one(
    plain: Checkpoint, dense: StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_module, "_CHUNK", 7 * 32)  # no divisor of the rows
    modules = [K, V]
    expected = nvfp4.quantize_weight(torch.cat([dense[f"{m}.weight"] for m in modules]))
    loaded = QuantizedCheckpoint(plain).linear(modules)
    assert loaded.kind == "nvfp4" and loaded.input_scale is None and loaded.bias is None
    assert same(weight_of(QuantizedCheckpoint(plain), modules), expected)


def test_headers_tell_what_the_linears_will_be(plain: Checkpoint) -> None:
    checkpoint = QuantizedCheckpoint(plain)
    info = checkpoint.linear_info(Q)
    assert (info.kind, info.out_features, info.in_features, info.has_bias) == (
        "nvfp4",
        64,
        32,
        True,
    )
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.algorithm == "W4A16_NVFP4"
    loaded = checkpoint.linear([Q])
    assert loaded.bias is not None and torch.equal(loaded.bias, torch.arange(64).bfloat16())


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", ROUTER])
def test_embeddings_heads_and_routers_stay(
    plain: Checkpoint, dense: StateDict, module: str
) -> None:
    loaded = QuantizedCheckpoint(plain).linear([module])
    assert loaded.kind == QuantizedCheckpoint(plain).linear_info(module).kind == "dense"
    assert isinstance(loaded.weight, torch.Tensor)
    assert torch.equal(loaded.weight, dense[f"{module}.weight"])


def test_with_one_scale_a_linear_is_the_same_however_it_is_fused(plain: Checkpoint) -> None:
    one, own = QuantizedCheckpoint(plain, one_scale=True), QuantizedCheckpoint(plain)
    alone, fused = weight_of(one, [K]), weight_of(one, [K, V])
    rows = nvfp4.QuantizedTensor(fused.codes[:32], fused.block_scale[:32], fused.global_scale)
    assert same(alone, rows)
    linears = [name.removesuffix(".weight") for name in plain.names() if "_proj.w" in name]
    largest = max(weight_of(own, [module]).global_scale for module in linears)
    assert weight_of(own, [K]).global_scale < alone.global_scale == largest


def test_a_linear_of_zeros_is_exact(open_tensors: Open, dense: StateDict) -> None:
    dense[f"{V}.weight"].zero_()
    weight = weight_of(QuantizedCheckpoint(open_tensors(dense, algorithm=None)), [V])
    assert weight.global_scale > 0
    assert nvfp4.dequantize(weight).count_nonzero() == 0


def test_a_quantized_checkpoint_is_refused(open_tensors: Open, quantized: StateDict) -> None:
    with pytest.raises(CheckpointError, match=r"model: is quantized already \(NVFP4\)"):
        QuantizedCheckpoint(open_tensors(quantized))


def test_in_features_must_be_whole_blocks(open_tensors: Open, dense: StateDict) -> None:
    dense[f"{Q}.weight"] = torch.ones(64, 24).bfloat16()
    checkpoint = QuantizedCheckpoint(open_tensors(dense, algorithm=None))
    with pytest.raises(CheckpointError, match=f"cannot quantize {Q} to NVFP4: its in_features 24"):
        checkpoint.linear_info(Q)
