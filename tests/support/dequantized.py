"""Checkpoints as their oracles take them."""

import torch

from trtree.build.checkpoint import Checkpoint
from trtree.plugins.nvfp4_linear import format as nvfp4


def dequantized(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor in float32, NVFP4 weights expanded, with their low-rank factors, times what
    their inputs are scaled by: without rounding of inputs that is the same."""
    tensors = {}
    for name in checkpoint.names():
        module, _, part = name.rpartition(".")
        if part == "weight" and f"{module}.weight_scale" in checkpoint:
            weight = checkpoint.linear([module]).weight
            assert isinstance(weight, nvfp4.QuantizedTensor)
            tensors[name] = nvfp4.dequantize(weight)
            if (factor := f"{module}.svdquant_lora_a") in checkpoint:
                up = checkpoint.tensor(f"{module}.svdquant_lora_b").float()
                tensors[name] += up @ checkpoint.tensor(factor).float()
            if (vector := f"{module}.pre_quant_scale") in checkpoint:
                tensors[name] *= checkpoint.tensor(vector).float()
        elif not part.endswith(("_scale", "_scale_2", "_lora_a", "_lora_b")):
            tensors[name] = checkpoint.tensor(name).float()
    return tensors


def dequantized_by_modelopt(checkpoint: Checkpoint, module: str) -> torch.Tensor:
    """The stored tensors through ModelOpt's own class."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    stored = {
        part: checkpoint.tensor(f"{module}.{part}")
        for part in ("weight", "weight_scale", "weight_scale_2")
        if f"{module}.{part}" in checkpoint
    }
    codes = stored["weight"]
    if codes.dtype == torch.float8_e4m3fn:
        tensor = FP8QTensor(codes.shape, torch.float32, codes)
        return tensor.dequantize(dtype=torch.float32, scale=stored["weight_scale"])  # type: ignore[no-any-return]
    tensor = NVFP4QTensor(torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.float32, codes)
    return tensor.dequantize(  # type: ignore[no-any-return]
        dtype=torch.float32,
        scale=stored["weight_scale"],
        double_scale=stored["weight_scale_2"],
        block_sizes={-1: 2 * codes.shape[1] // stored["weight_scale"].shape[1]},
    )
