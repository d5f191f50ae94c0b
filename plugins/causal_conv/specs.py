"""The kernels as they are compiled ahead of time."""

from dataclasses import dataclass

import torch

from trtree.plugins.causal_conv import tiles
from trtree.plugins.causal_conv.kernels.conv import causal_conv_commit_kernel, causal_conv_kernel
from trtree.plugins.tree_attention.aot import KernelSpec

TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class ConvLayer:
    """What a layer's kernels are specialized to. kernel: a row's inputs, its own among them."""

    kernel: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def pointer(self) -> str:
        return f"*{TRITON_TYPES[self.dtype]}"


def conv_spec(layer: ConvLayer) -> KernelSpec:
    x = layer.pointer
    return KernelSpec(
        "causal_conv",
        causal_conv_kernel,
        {
            "x": x,
            "weight": "*fp32",
            "window": x,
            **dict.fromkeys(("inputs", "owners", "requests"), "*i32"),
            **dict.fromkeys(("rows", "channels", "x_stride"), "i32"),
            "out": x,
        },
        {"KERNEL": layer.kernel, "BLOCK": tiles.ROWS, "BLOCK_C": tiles.CHANNELS},
    )


def commit_spec(layer: ConvLayer) -> KernelSpec:
    x = layer.pointer
    return KernelSpec(
        "causal_conv_commit",
        causal_conv_commit_kernel,
        {
            "x": x,
            **dict.fromkeys(("requests", "accepted", "num_accepted"), "*i32"),
            **dict.fromkeys(("channels", "x_stride", "max_accepted"), "i32"),
            "window": x,
        },
        {"KERNEL": layer.kernel, "BLOCK_C": tiles.COMMIT_CHANNELS},
    )
