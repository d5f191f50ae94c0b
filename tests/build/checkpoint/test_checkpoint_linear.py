"""Linears of a checkpoint: kinds, fusing, and every inconsistency refused by name."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trtree.build.checkpoint import Checkpoint, CheckpointError, LinearInfo
from trtree.build.checkpoint.quantization import SIDECAR
from trtree.build.lowering.packing import append_linear
from trtree.build.resumable import ResumableFile
from trtree.plugins.nvfp4_linear import format as nvfp4

StateDict = dict[str, torch.Tensor]
Open = Callable[..., Checkpoint]

ATTENTION = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
MLP = [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up")]
Q, K, V = ATTENTION


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def dequantized(checkpoint: Checkpoint, modules: list[str]) -> torch.Tensor:
    weight = checkpoint.linear(modules).weight
    assert isinstance(weight, nvfp4.QuantizedTensor)
    return nvfp4.dequantize(weight)


# Kinds


def test_kinds_come_from_the_checkpoint(open_tensors: Open, quantized: StateDict) -> None:
    quantized[f"{Q}.bias"] = torch.zeros(64).bfloat16()
    checkpoint = open_tensors(quantized)
    assert checkpoint.linear_info(Q) == LinearInfo("nvfp4", 64, 32, True, torch.uint8, "NVFP4")
    assert checkpoint.linear_info(K) == LinearInfo("nvfp4", 32, 32, False, torch.uint8, "NVFP4")
    assert checkpoint.linear_info("lm_head") == LinearInfo("dense", 40, 32, False, torch.bfloat16)


def test_headers_alone_tell_the_kind(open_tensors: Open, quantized: StateDict) -> None:
    checkpoint = open_tensors(quantized)
    (checkpoint.directory / "model.safetensors").unlink()
    assert checkpoint.linear_info(Q).out_features == 64
    with pytest.raises(CheckpointError, match=rf"tensor {Q}\.\w+: cannot map .*No such file"):
        checkpoint.linear([Q])


def test_embeddings_need_no_exclusion(open_tensors: Open, quantized: StateDict) -> None:
    checkpoint = open_tensors(quantized, exclude=("lm_head",))
    assert checkpoint.linear_info("model.embed_tokens").kind == "dense"


def test_an_unknown_module_is_named(open_tensors: Open, quantized: StateDict) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor model.nope.weight"):
        open_tensors(quantized).linear_info("model.nope")


# Loading and fusing


def test_a_dense_linear(open_tensors: Open, dense: StateDict) -> None:
    dense["lm_head.bias"] = torch.randn(40).bfloat16()
    loaded = open_tensors(dense, algorithm=None).linear(["lm_head"])
    assert (loaded.kind, loaded.input_scale) == ("dense", None)
    assert isinstance(loaded.weight, torch.Tensor) and loaded.bias is not None
    assert torch.equal(loaded.weight, dense["lm_head.weight"])
    assert torch.equal(loaded.bias, dense["lm_head.bias"])


def test_dense_linears_concatenate(open_tensors: Open, dense: StateDict) -> None:
    for module in ATTENTION:
        dense[f"{module}.bias"] = torch.randn(len(dense[f"{module}.weight"])).bfloat16()
    loaded = open_tensors(dense, algorithm=None).linear(ATTENTION)
    assert isinstance(loaded.weight, torch.Tensor) and loaded.bias is not None
    assert torch.equal(loaded.weight, torch.cat([dense[f"{m}.weight"] for m in ATTENTION]))
    assert torch.equal(loaded.bias, torch.cat([dense[f"{m}.bias"] for m in ATTENTION]))


def test_an_nvfp4_linear(open_tensors: Open, quantized: StateDict) -> None:
    quantized[f"{Q}.weight_scale_2"] = quantized[f"{Q}.weight_scale_2"].reshape(1)
    loaded = open_tensors(quantized).linear([Q])
    assert isinstance(loaded.weight, nvfp4.QuantizedTensor)
    assert loaded.weight.global_scale.shape == ()
    for part, tensor in zip(("weight", "weight_scale"), loaded.weight, strict=False):
        assert tensor.dtype == quantized[f"{Q}.{part}"].dtype
        assert torch.equal(as_bytes(tensor), as_bytes(quantized[f"{Q}.{part}"]))
    assert loaded.weight.global_scale == quantized[f"{Q}.weight_scale_2"]
    assert loaded.input_scale == quantized[f"{Q}.input_scale"]
    assert loaded.bias is None


def test_one_global_scale_concatenates_exactly(
    demo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint.open(demo / "target_nvfp4")
    for modules in (ATTENTION, MLP):
        parts = [dequantized(checkpoint, [module]) for module in modules]
        assert torch.equal(dequantized(checkpoint, modules), torch.cat(parts))
    assert not caplog.records


def test_differing_global_scales_are_rescaled_to_the_largest(
    open_tensors: Open, quantized: StateDict, caplog: pytest.LogCaptureFixture
) -> None:
    """By hand: under 1.0 instead of 0.3, block scales 1, 7, 13 and 448 become 0.3, 2.1,
    3.9 and 134.4. e4m3 has 8 steps per octave there, of 1/32, 1/4, 1/4 and 16: the
    nearest values are 0.3125, 2, 4 and 128."""
    for module, scale in ((Q, 1.0), (K, 0.3), (V, 1.0)):
        quantized[f"{module}.weight_scale_2"] = torch.tensor(scale)
    blocks = torch.tensor([[1.0, 7.0], [13.0, 448.0]]).to(torch.float8_e4m3fn)
    quantized[f"{K}.weight_scale"] = blocks.repeat(16, 1)
    quantized[f"{K}.weight"] = torch.full((32, 16), 0x93, dtype=torch.uint8)  # 1.5, -0.5
    quantized[f"{K}.input_scale"] = torch.tensor(0.02)
    quantized[f"{Q}.input_scale"] = torch.tensor(0.01)
    quantized[f"{V}.input_scale"] = torch.tensor(0.005)
    with caplog.at_level(logging.WARNING):
        fused = open_tensors(quantized).linear(ATTENTION)
    assert isinstance(fused.weight, nvfp4.QuantizedTensor)
    assert fused.weight.global_scale == 1.0
    assert fused.input_scale == torch.tensor(0.02)
    scales = fused.weight.block_scale.float()
    assert scales[64:66].tolist() == [[0.3125, 2.0], [4.0, 128.0]]
    row = nvfp4.dequantize(fused.weight)[64]
    assert row[:2].tolist() == [0.46875, -0.15625]
    assert row[16:18].tolist() == [3.0, -1.0]
    for module, rows in ((Q, slice(0, 64)), (V, slice(96, 128))):
        expected = quantized[f"{module}.weight_scale"].float()
        assert torch.equal(scales[rows], expected)
    assert len(caplog.messages) == 1
    assert f"{K}: weight_scale_2 0.3 rescaled to 1" in caplog.messages[0]
    assert " + ".join(ATTENTION) in caplog.messages[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{K}.bias": torch.zeros(32)}), "has_bias False and True"),
        (lambda t: t.update({f"{K}.weight": t[f"{K}.weight"].float()}), "bfloat16 and torch.fl"),
        (lambda t: t.update({f"{K}.weight": torch.zeros(32, 16)}), "dtype torch.bfloat16 and"),
        (
            lambda t: t.update({f"{K}.weight": torch.zeros(32, 16).bfloat16()}),
            "in_features 32 and 16",
        ),
    ],
)
def test_what_cannot_be_fused_is_refused(
    open_tensors: Open, dense: StateDict, change: Callable[[StateDict], None], message: str
) -> None:
    change(dense)
    checkpoint = open_tensors(dense, algorithm=None)
    with pytest.raises(CheckpointError, match=f"cannot fuse {Q} and {K}: .*{message}"):
        checkpoint.linear(ATTENTION)


def test_kinds_cannot_be_mixed(open_tensors: Open, quantized: StateDict, dense: StateDict) -> None:
    for part in ("weight_scale", "weight_scale_2", "input_scale"):
        del quantized[f"{V}.{part}"]
    quantized[f"{V}.weight"] = dense[f"{V}.weight"]
    checkpoint = open_tensors(quantized, exclude=("lm_head", V))
    with pytest.raises(CheckpointError, match=f"cannot fuse {Q} and {V}: kind nvfp4 and dense"):
        checkpoint.linear(ATTENTION)


def test_no_modules_is_a_mistake_of_the_caller(open_tensors: Open, dense: StateDict) -> None:
    with pytest.raises(ValueError, match="no modules"):
        open_tensors(dense, algorithm=None).linear([])


def test_weight_only_linears_need_no_input_scale(open_tensors: Open, quantized: StateDict) -> None:
    given = open_tensors(quantized, algorithm="W4A16_NVFP4")
    assert given.linear(ATTENTION).input_scale is not None
    for module in ATTENTION:
        del quantized[f"{module}.input_scale"]
    (given.directory).rename(given.directory.with_name("other"))
    checkpoint = open_tensors(quantized, algorithm="W4A16_NVFP4")
    assert checkpoint.linear(ATTENTION).input_scale is None


# What opening refuses


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.weight_scale": None}, f"{Q} is NVFP4 but has no tensor {Q}.weight_scale;"),
        ({f"{Q}.weight_scale_2": None}, f"{Q} is NVFP4 but has no tensor {Q}.weight_scale_2"),
        ({f"{Q}.input_scale": None}, f"{Q} is NVFP4 but has no tensor {Q}.input_scale"),
        ({f"{Q}.weight": None}, f"has no tensor {Q}.weight"),
        (
            {f"{Q}.weight_scale": e4m3(64, 1)},
            rf"{Q}.weight_scale has shape \[64, 1\], expected \[64, 2\]",
        ),
        (
            {f"{Q}.weight_scale": e4m3(32, 2)},
            rf"{Q}.weight_scale has shape \[32, 2\], expected \[64, 2\]",
        ),
        (
            {f"{Q}.weight_scale": zeros(64, 2, dtype=torch.uint8)},
            f"{Q}.weight_scale is uint8, expected float8_e4m3fn",
        ),
        (
            {f"{Q}.weight_scale_2": torch.ones(2)},
            rf"{Q}.weight_scale_2 has shape \[2\], expected \[\] or \[1\]",
        ),
        (
            {f"{Q}.input_scale": torch.ones(()).bfloat16()},
            f"{Q}.input_scale is bfloat16, expected float32",
        ),
        (
            {f"{Q}.weight": zeros(64, 12, dtype=torch.uint8)},
            rf"{Q}.weight has shape \[64, 12\], expected \[out_features, in_features / 2\]",
        ),
        (
            {f"{Q}.weight": zeros(64, dtype=torch.uint8)},
            rf"{Q}.weight has shape \[64\], expected \[out_features",
        ),
        ({f"{Q}.bias": zeros(32)}, rf"{Q}.bias has shape \[32\], expected \[64\]"),
        ({f"{Q}.bias": zeros(64, dtype=torch.int8)}, f"{Q}.bias is int8, expected bfloat16"),
        (
            {f"{Q}.weight": zeros(64, 32)},
            f"{Q}.weight is bfloat16, but .*{SIDECAR} says that {Q} is NVFP4; .* list it",
        ),
        (
            {f"{Q}.weight": zeros(64, 32, dtype=torch.float8_e4m3fn)},
            f"{Q}.weight is float8_e4m3fn, but .*{SIDECAR} says that {Q} is NVFP4; correct",
        ),
        (
            {f"{Q}.pre_quant_scale": zeros(32)},
            f"tensor {Q}.pre_quant_scale belongs to NVFP4_AWQ, but .* {Q} is NVFP4",
        ),
        (
            {"lm_head.weight": zeros(40, 16, dtype=torch.uint8)},
            f"lm_head.weight is uint8, but .*{SIDECAR} excludes lm_head",
        ),
        ({"lm_head.weight_scale": e4m3(40, 2)}, "lm_head.weight is bfloat16, but lm_head.weight_s"),
        (
            {f"{EXPERTS}.gate_up_proj": zeros(2, 32, 96)},
            f"{EXPERTS}.0.gate_proj.weight is bfloat16, but .*{SIDECAR}.* left unquantized",
        ),
        (
            {f"{EXPERTS}.3.up_proj.weight": zeros(48, 32)},
            f"{EXPERTS}.3.up_proj.weight is bfloat16, but .* left unquantized",
        ),
    ],
)
def test_an_inconsistent_export_is_refused_when_opened(
    open_tensors: Open, quantized: StateDict, changes: dict[str, Any], message: str
) -> None:
    changed = {**quantized, **changes}
    with pytest.raises(CheckpointError, match=message) as caught:
        open_tensors({name: tensor for name, tensor in changed.items() if tensor is not None})
    assert "\n" not in str(caught.value)


def test_a_linear_left_unquantized_is_refused(
    open_tensors: Open, quantized: StateDict, dense: StateDict
) -> None:
    """Without scales nothing tells a linear from a norm: the family's request does."""
    for part in ("weight_scale", "weight_scale_2", "input_scale"):
        del quantized[f"{Q}.{part}"]
    quantized[f"{Q}.weight"] = dense[f"{Q}.weight"]
    checkpoint = open_tensors(quantized)
    with pytest.raises(CheckpointError, match=f"says that {Q} is NVFP4; it was left unquantized"):
        checkpoint.linear_info(Q)


def test_experts_may_be_excluded_on_purpose(open_tensors: Open, quantized: StateDict) -> None:
    quantized[f"{EXPERTS}.gate_up_proj"] = zeros(2, 32, 96)
    open_tensors(quantized, exclude=("lm_head", "model.layers.0.mlp.experts*"))


def test_codes_without_a_configuration_are_refused(
    open_tensors: Open, quantized: StateDict
) -> None:
    with pytest.raises(CheckpointError, match="is uint8, but the checkpoint has no quantization"):
        open_tensors(quantized, algorithm=None)


@pytest.mark.parametrize("shape", [(32,), (2, 32, 32)])
def test_a_linear_has_two_axes(
    open_tensors: Open, dense: StateDict, shape: tuple[int, ...]
) -> None:
    dense["lm_head.weight"] = zeros(*shape)
    checkpoint = open_tensors(dense, algorithm=None)
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape .* expected \[out_f"):
        checkpoint.linear_info("lm_head")


# What loading refuses


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy whose element [1, 1] has this value."""
    changed = tensor.float()
    changed[1, 1] = value
    return changed.to(tensor.dtype)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_scale", float("nan"), r"weight_scale: 1 of 128 values are NaN .* at \[1, 1\]"),
        ("weight_scale", -2.0, r"weight_scale has 1 negative block scales of 128 \(first: -2"),
        ("weight_scale_2", 0.0, r"weight_scale_2 is 0.0, .* an all-zero tensor exports so"),
        ("weight_scale_2", -1.0, r"weight_scale_2 is -1.0, expected a positive number; export"),
        ("weight_scale_2", float("inf"), r"weight_scale_2: 1 of 1 values are NaN or infinite"),
        ("input_scale", 0.0, r"input_scale is 0.0, expected a positive number; export"),
        ("input_scale", float("nan"), r"input_scale: 1 of 1 values are NaN or infinite"),
    ],
)
def test_bad_scales_are_refused(
    open_tensors: Open,
    quantized: StateDict,
    part: str,
    value: float,
    message: str,
    tmp_path: Path,
) -> None:
    tensor = quantized[f"{Q}.{part}"]
    quantized[f"{Q}.{part}"] = with_value(tensor, value) if tensor.dim() else torch.tensor(value)
    checkpoint = open_tensors(quantized)
    with pytest.raises(CheckpointError, match=rf"safetensors: tensor {Q}.{message}"):
        checkpoint.linear(ATTENTION)
    # And while it is packed, which reads it once: alone, so that the scale is not rounded again.
    with (
        pytest.raises(CheckpointError, match=rf"safetensors: tensor {Q}.{message}"),
        ResumableFile(tmp_path / "file") as file,
    ):
        append_linear(file, checkpoint.stored_linear([Q]), [Q], checkpoint)


def test_zero_block_scales_are_legal(open_tensors: Open, quantized: StateDict) -> None:
    raw = quantized[f"{Q}.weight_scale"].view(torch.uint8)
    raw[0, 0], raw[1, 1] = 0x00, 0x80  # both zeros
    loaded = open_tensors(quantized).linear([Q]).weight
    assert isinstance(loaded, nvfp4.QuantizedTensor)
    assert loaded.block_scale[0, 0] == loaded.block_scale[1, 1] == 0


# The KV cache's scales, FP8, AWQ


K_SCALE, V_SCALE = f"{K}.k_scale", f"{V}.v_scale"


def test_kv_scales_are_read(open_tensors: Open, quantized: StateDict) -> None:
    quantized[K_SCALE], quantized[V_SCALE] = torch.tensor(0.5), torch.tensor([2.0]).bfloat16()
    checkpoint = open_tensors(quantized, kv_cache="FP8")
    assert checkpoint.kv_scales() == {K_SCALE: 0.5, V_SCALE: 2.0}
    assert open_tensors(quantized, kv_cache="NVFP4", directory="other").kv_scales()


@pytest.mark.parametrize(
    ("scale", "kv_cache", "message"),
    [
        (torch.tensor(1.0), None, "k_scale is a scale of a quantized KV cache, but"),
        (torch.ones(2), "FP8", r"k_scale has shape \[2\], expected \[\] or \[1\]"),
        (torch.tensor(1), "FP8", "k_scale is int64, expected bfloat16"),
    ],
)
def test_odd_kv_scales_are_refused(
    open_tensors: Open,
    quantized: StateDict,
    scale: torch.Tensor,
    kv_cache: str | None,
    message: str,
) -> None:
    quantized[K_SCALE] = scale
    with pytest.raises(CheckpointError, match=message):
        open_tensors(quantized, kv_cache=kv_cache)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_kv_scales_are_positive(open_tensors: Open, quantized: StateDict, value: float) -> None:
    quantized[K_SCALE] = torch.tensor(value)
    with pytest.raises(CheckpointError, match=f"tensor {K_SCALE}"):
        open_tensors(quantized, kv_cache="FP8").kv_scales()


def fp8(dense: StateDict) -> StateDict:
    tensors = {}
    for name, tensor in dense.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        scale = tensor.abs().max().float() / 448
        tensors[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.input_scale"] = torch.tensor(0.1)
    return tensors


@pytest.fixture
def open_fp8(
    open_tensors: Open, write: Callable[..., Path], edit_json: Callable[..., None]
) -> Open:
    def open_fp8(tensors: StateDict) -> Checkpoint:
        path = write(tensors)

        def name_fp8(data: dict[str, Any]) -> None:
            data["quantization"] |= {"quant_algo": "FP8", "group_size": None}

        edit_json(path / SIDECAR, name_fp8)
        edit_json(path / "config.json", lambda data: data.pop("quantization_config"))
        return Checkpoint.open(path)

    return open_fp8


def test_fp8_linears_of_different_scales_concatenate_exactly(
    open_fp8: Open, dense: StateDict
) -> None:
    tensors = fp8(dense)
    loaded = open_fp8(tensors).linear(ATTENTION).weight
    expected = [tensors[f"{m}.weight"].float() * tensors[f"{m}.weight_scale"] for m in ATTENTION]
    assert isinstance(loaded, torch.Tensor) and torch.equal(loaded, torch.cat(expected))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{Q}.weight_scale", None, f"{Q} is FP8 but has no tensor {Q}.weight_scale"),
        (f"{Q}.weight_scale", torch.ones(64, 1), r"shape \[64, 1\], expected \[\] or \[1\]"),
        (f"{Q}.weight_scale", torch.tensor(-1.0), "values that are not positive"),
        (f"{Q}.weight_scale", torch.tensor(float("nan")), "NaN or infinite"),
        (f"{Q}.weight_scale_inv", torch.ones(1), "weight_scale_inv belongs to a quantization"),
        (f"{Q}.weight", torch.zeros(64, 16).to(torch.uint8), f"says that {Q} is FP8; correct"),
        (f"{Q}.weight", torch.zeros(64, 32).bfloat16(), f"{Q} is FP8; it was left unquantized"),
        (
            f"{Q}.weight",
            torch.full((64, 32), float("nan")).to(torch.float8_e4m3fn),
            "2048 of 2048 values are NaN",
        ),
    ],
)
def test_odd_fp8_linears_are_refused(
    open_fp8: Open, dense: StateDict, name: str, value: torch.Tensor | None, message: str
) -> None:
    tensors = fp8(dense)
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    with pytest.raises(CheckpointError, match=message):
        open_fp8(tensors).linear([Q])
