"""Checkpoints in compressed-tensors' format, made by that library, read back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.build.checkpoint.compressed_tensors import parse
from trtree.build.checkpoint.write import write_checkpoint
from trtree.plugins.nvfp4_linear import format as nvfp4

StateDict = dict[str, torch.Tensor]
Json = dict[str, Any]

ATTENTION = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
Q, K, V = ATTENTION
WHERE = "config.json: quantization_config"


@pytest.fixture(scope="module")
def library() -> Any:
    import compressed_tensors.quantization as library

    return library


def scheme_of(library: Any, name: str) -> Any:
    return library.preset_name_to_scheme(name, ["Linear"])


def config_of(library: Any, schemes: dict[str, Any], **fields: Any) -> Json:
    """config.json's section, as the library serializes it."""
    config = library.QuantizationConfig(
        config_groups=schemes,
        quantization_status=library.QuantizationStatus.COMPRESSED,
        **fields,
    )
    written: Json = json.loads(json.dumps(config.to_dict()))
    return written


def compressed(library: Any, weight: torch.Tensor, scheme: Any) -> StateDict:
    """A linear's tensors, by the library's own calibration and packing."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    global_scale = generate_gparam(weight.min().float(), weight.max().float())
    blocks = weight.float().reshape(len(weight), -1, 16)
    low, high = blocks.amin(dim=-1), blocks.amax(dim=-1)
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    if scheme.input_activations is not None:
        state["input_global_scale"] = torch.tensor([6 * 448 / 8.0])
    packed: StateDict = NVFP4PackedCompressor.compress(state, scheme)
    return packed


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Checkpoint]:
    def write(tensors: StateDict, quantization: Json) -> Checkpoint:
        write_checkpoint(tmp_path / "model", tensors.items(), {"quantization_config": quantization})
        return Checkpoint.open(tmp_path / "model")

    return write


def quantize_all(library: Any, dense: StateDict, scheme: Any) -> StateDict:
    tensors: StateDict = {}
    for name, tensor in dense.items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            parts = compressed(library, tensor, scheme)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    return tensors


@pytest.mark.parametrize(("preset", "algorithm"), [("NVFP4", "NVFP4"), ("NVFP4A16", "W4A16_NVFP4")])
def test_weights_equal_the_librarys_to_the_last_bit(
    library: Any, dense: StateDict, write: Callable[..., Checkpoint], preset: str, algorithm: str
) -> None:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme = scheme_of(library, preset)
    tensors = quantize_all(library, dense, scheme)
    quantization = config_of(
        library, {"group_0": scheme}, ignore=["lm_head"], format="nvfp4-pack-quantized"
    )
    checkpoint = write(tensors, quantization)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.algorithm == algorithm
    modules = [n.removesuffix(".weight_packed") for n in tensors if n.endswith("weight_packed")]
    assert len(modules) == 7
    for module in modules:
        state = {
            part: tensors[f"{module}.{part}"]
            for part in ("weight_packed", "weight_scale", "weight_global_scale")
        }
        loaded = checkpoint.linear([module])
        assert isinstance(loaded.weight, nvfp4.QuantizedTensor)
        ours = nvfp4.dequantize(loaded.weight)
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        assert theirs.count_nonzero() > 0
        assert torch.equal(ours.bfloat16(), theirs)  # the library rounds to bf16
        exact = dequantize(
            x_q=nvfp4.e2m1_values(state["weight_packed"]),
            scale=state["weight_scale"].float(),
            args=scheme.weights,
            global_scale=state["weight_global_scale"],
            dtype=torch.float32,
        )
        assert torch.equal(ours, exact)
        if preset == "NVFP4":
            assert loaded.input_scale is not None
            assert loaded.input_scale.item() == pytest.approx(8.0 / (6 * 448), rel=1e-7)
        else:
            assert loaded.input_scale is None


def test_globals_that_a_float32_reciprocal_would_miss() -> None:
    """Dividing by the stored number, as the library does, against multiplying by its
    reciprocal: float32 misses the last bit of some, float64 of none."""
    stored = torch.rand(512, generator=torch.Generator().manual_seed(0)) * 1e4 + 1
    block = torch.arange(1, 127).to(torch.uint8).view(torch.float8_e4m3fn)
    missed = 0
    for value in stored:
        expected = block.float() / value
        codes = torch.full((len(block), 8), 0x22, dtype=torch.uint8)  # all ones
        ours = nvfp4.dequantize(
            nvfp4.QuantizedTensor(codes, block.unsqueeze(1), 1 / value.double())
        )
        assert torch.equal(ours[:, 0], expected)
        missed += int((block.float() * (1 / value) != expected).sum())
    assert missed > 0


def test_differing_globals_are_rescaled_to_the_largest(
    library: Any, dense: StateDict, write: Callable[..., Checkpoint]
) -> None:
    """Reciprocals: the largest scale is the smallest number stored."""
    scheme = scheme_of(library, "NVFP4")
    tensors = quantize_all(library, dense, scheme)
    quantization = config_of(library, {"group_0": scheme}, ignore=["lm_head"])
    checkpoint = write(tensors, quantization | {"format": "nvfp4-pack-quantized"})
    stored = [tensors[f"{m}.weight_global_scale"].item() for m in ATTENTION]
    assert len(set(stored)) == 3
    fused = checkpoint.linear(ATTENTION).weight
    assert isinstance(fused, nvfp4.QuantizedTensor)
    assert fused.global_scale.item() == pytest.approx(1 / min(stored))
    alone = torch.cat([nvfp4.dequantize(_nvfp4(checkpoint, m)) for m in ATTENTION])
    difference = (nvfp4.dequantize(fused) - alone).abs()
    assert 0 < difference.max() <= alone.abs().max() / 16  # half an e4m3 step


def _nvfp4(checkpoint: Checkpoint, module: str) -> nvfp4.QuantizedTensor:
    weight = checkpoint.linear([module]).weight
    assert isinstance(weight, nvfp4.QuantizedTensor)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_beside_nvfp4(
    library: Any, dense: StateDict, write: Callable[..., Checkpoint], dtype: torch.dtype
) -> None:
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    scheme = scheme_of(library, "NVFP4")
    fp8 = scheme_of(library, "FP8_DYNAMIC")
    fp8.targets = ["re:.*self_attn.*"]
    tensors = quantize_all(library, dense, scheme)
    for name in [n for n in tensors if "self_attn" in n]:
        del tensors[name]
    attention = [n.removesuffix(".weight") for n in dense if "self_attn" in n]
    for module in attention:
        weight = dense[f"{module}.weight"].float()
        scale = (weight.abs().amax(dim=1, keepdim=True) / 448).to(dtype)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight"] = (weight / scale.float()).to(torch.float8_e4m3fn)
    quantization = config_of(library, {"group_0": scheme, "group_1": fp8}, ignore=["re:.*lm_head"])
    checkpoint = write(tensors, quantization | {"format": "mixed-precision"})
    for module in attention:
        assert checkpoint.linear_info(module).algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
        loaded = checkpoint.linear([module])
        assert loaded.kind == "dense" and isinstance(loaded.weight, torch.Tensor)
        theirs = dequantize(
            tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"], args=fp8.weights
        )
        assert loaded.weight.dtype == checkpoint.linear_info(module).dtype == dtype
        assert torch.equal(loaded.weight, theirs)
    assert checkpoint.linear_info("model.layers.0.mlp.up_proj").algorithm == "NVFP4"
    assert checkpoint.linear_info("lm_head").kind == "dense"


# What is refused


GROUP: Json = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "input_activations": None,
}


def section(**changes: Any) -> Json:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (section(format="pack-quantized"), "format 'pack-quantized' is not supported"),
        (section(quantization_status="frozen"), "quantization_status is 'frozen'"),
        (section(transform_config={"a": 1}), "transform_config .* is not supported"),
        (section(config_groups={}), "config_groups must be an object of schemes"),
        (section(config_groups={"g": 1}), "config_groups.g must be an object"),
        (
            section(config_groups={"g": GROUP | {"weights": {"num_bits": 4, "type": "int"}}}),
            r"4-bit int weights \(strategy None, group_size None\)",
        ),
        (
            section(
                config_groups={"g": GROUP | {"input_activations": {"num_bits": 8, "type": "float"}}}
            ),
            "with inputs of 8 bits are not supported",
        ),
        (section(config_groups={"g": GROUP | {"targets": ["Embedding"]}}), "target 'Embedding'"),
        (section(config_groups={"g": GROUP | {"output_activations": {}, "targets": 1}}), "list of"),
        (section(ignore=["re:(a"]), r"'re:\(a' is no expression"),
        (section(kv_cache_scheme={"num_bits": 4, "type": "float"}), "kv_cache_scheme .* not supp"),
    ],
)
def test_what_is_unknown_is_refused(data: Json, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(data, WHERE)
    assert str(caught.value).startswith(WHERE) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ignore", "module", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("re:.*gate", "model.layers.0.mlp.gate", True),
        ("re:.*gate", "model.layers.0.mlp.gate_proj", True),  # a match at the start is enough
        ("re:.*gate$", "model.layers.0.mlp.gate_proj", False),
        ("re:layers", "model.layers.0", False),
    ],
)
def test_ignored_modules(ignore: str, module: str, ignored: bool) -> None:
    assert parse(section(ignore=[ignore]), WHERE).is_excluded(module) is ignored


def test_named_modules_come_before_every_linear() -> None:
    fp8 = {
        "targets": ["re:.*attn", "a.b"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    found = parse(section(config_groups={"g": GROUP, "h": fp8}), WHERE)
    algorithms = [found.algorithm_of(m) for m in ("x.attn.q", "a.b", "a.c")]
    assert algorithms == ["FP8", "FP8", "W4A16_NVFP4"]


@pytest.mark.parametrize("part", ["weight_scale", "weight_global_scale", "input_global_scale"])
def test_missing_scales_are_named(
    library: Any, dense: StateDict, write: Callable[..., Checkpoint], part: str
) -> None:
    scheme = scheme_of(library, "NVFP4")
    tensors = quantize_all(library, dense, scheme)
    del tensors[f"{K}.{part}"]
    with pytest.raises(CheckpointError, match=f"{K} is NVFP4 but has no tensor {K}.{part}; export"):
        write(tensors, config_of(library, {"g": scheme}, ignore=["lm_head"]) | {"format": None})


def test_modelopts_names_are_refused_here(
    library: Any, dense: StateDict, write: Callable[..., Checkpoint]
) -> None:
    """A reciprocal taken for a scale would give garbage."""
    scheme = scheme_of(library, "NVFP4")
    tensors = quantize_all(library, dense, scheme)
    tensors[f"{Q}.weight_scale_2"] = tensors.pop(f"{Q}.weight_global_scale")
    with pytest.raises(CheckpointError, match=f"tensor {Q}.weight_scale_2 belongs to"):
        write(tensors, config_of(library, {"g": scheme}, ignore=["lm_head"]) | {"format": None})
