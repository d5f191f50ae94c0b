"""ModelOpt's own quantizer as the oracle, on the demo target and on random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trtree.build.checkpoint import Checkpoint
from trtree.build.checkpoint.write import quantize_state_dict
from trtree.plugins.nvfp4_linear import format as nvfp4


@pytest.fixture(scope="module")
def modelopt() -> Any:
    """``NVFP4QTensor``; imported late, as it takes seconds."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    return NVFP4QTensor


def dequantized_by(modelopt: Any, weight: nvfp4.QuantizedTensor) -> torch.Tensor:
    rows, half = weight.codes.shape
    quantized = modelopt(torch.Size((rows, 2 * half)), torch.float32, weight.codes)
    return quantized.dequantize(  # type: ignore[no-any-return]
        dtype=torch.float32,
        scale=weight.block_scale,
        double_scale=weight.global_scale,
        block_sizes={-1: 16},
    )


def random_weight(dtype: torch.dtype) -> torch.Tensor:
    """Blocks over 30 binary orders of magnitude, some of them zero."""
    generator = torch.Generator().manual_seed(1)
    magnitude = 2.0 ** torch.randint(-30, 1, (96, 8), generator=generator)
    weight = torch.randn(96, 128, generator=generator) * magnitude.repeat_interleave(16, dim=1)
    weight[5, :48] = 0.0
    return weight.to(dtype)


def test_every_linear_of_the_demo_target_dequantizes_alike(modelopt: Any, demo: Path) -> None:
    checkpoint = Checkpoint.open(demo / "target_nvfp4")
    modules = [n.removesuffix(".weight_scale") for n in checkpoint.names() if n.endswith("scale")]
    modules = [m for m in modules if not m.endswith("input_scale")]
    assert len(modules) == 7 * checkpoint.config["num_hidden_layers"]
    for module in modules:
        weight = checkpoint.linear([module]).weight
        assert isinstance(weight, nvfp4.QuantizedTensor)
        ours = nvfp4.dequantize(weight)
        assert ours.count_nonzero() > 0
        assert torch.equal(ours, dequantized_by(modelopt, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_weights_quantize_and_dequantize_alike(modelopt: Any, dtype: torch.dtype) -> None:
    weight = random_weight(dtype)
    ours = nvfp4.quantize_weight(weight)
    theirs, block_scale, global_scale = modelopt.quantize(weight.clone(), 16)
    assert torch.equal(ours.global_scale, global_scale)
    assert torch.equal(ours.block_scale.view(torch.uint8), block_scale.view(torch.uint8))
    # A zero may carry a sign that ModelOpt drops.
    same = ours.codes == theirs._quantized_data
    assert torch.equal(
        nvfp4.unpack(ours.codes[~same]) & 7, nvfp4.unpack(theirs._quantized_data[~same]) & 7
    )
    assert torch.equal(nvfp4.dequantize(ours), dequantized_by(modelopt, ours))


def test_siblings_quantize_as_modelopt_does_under_one_global_scale(modelopt: Any) -> None:
    weights = {"a.gate_proj": random_weight(torch.float32), "a.up_proj": torch.ones(16, 128) * 3}
    result = dict(quantize_state_dict((f"{m}.weight", w) for m, w in weights.items()))
    shared = torch.stack([w.abs().max() for w in weights.values()]).max() / (6 * 448)
    for module, weight in weights.items():
        theirs, block_scale, _ = modelopt.quantize(weight.clone(), 16, None, shared)
        assert torch.equal(result[f"{module}.weight_scale_2"], shared)
        scale = result[f"{module}.weight_scale"]
        assert torch.equal(scale.view(torch.uint8), block_scale.view(torch.uint8))
        ours = nvfp4.QuantizedTensor(result[f"{module}.weight"], scale, shared)
        expected = nvfp4.QuantizedTensor(theirs._quantized_data, block_scale, shared)
        assert torch.equal(nvfp4.dequantize(ours), nvfp4.dequantize(expected))
