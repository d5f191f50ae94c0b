"""Checkpoints as their oracles take them."""

import torch

from trtree.build.checkpoint import Checkpoint
from trtree.plugins.nvfp4_linear import format as nvfp4


def dequantized(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every tensor in float32, NVFP4 weights expanded."""
    tensors = {}
    for name in checkpoint.names():
        module, _, part = name.rpartition(".")
        if part == "weight" and f"{module}.weight_scale" in checkpoint:
            weight = checkpoint.linear([module]).weight
            assert isinstance(weight, nvfp4.QuantizedTensor)
            tensors[name] = nvfp4.dequantize(weight)
        elif not part.endswith(("_scale", "_scale_2")):
            tensors[name] = checkpoint.tensor(name).float()
    return tensors
