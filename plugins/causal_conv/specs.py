"""The kernels as they are compiled ahead of time."""

import torch

from trtree.plugins.causal_conv import tiles
from trtree.plugins.causal_conv.kernels.conv import causal_conv_commit_kernel, causal_conv_kernel
from trtree.plugins.tree_attention.aot import KernelSpec

TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def conv_spec(kernel: int, dtype: torch.dtype = torch.bfloat16) -> KernelSpec:
    x = f"*{TRITON_TYPES[dtype]}"
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
        {"KERNEL": kernel, "BLOCK": tiles.ROWS, "BLOCK_C": tiles.CHANNELS},
    )


def commit_spec(kernel: int, dtype: torch.dtype = torch.bfloat16) -> KernelSpec:
    x = f"*{TRITON_TYPES[dtype]}"
    return KernelSpec(
        "causal_conv_commit",
        causal_conv_commit_kernel,
        {
            "x": x,
            **dict.fromkeys(("requests", "accepted", "num_accepted"), "*i32"),
            **dict.fromkeys(("channels", "x_stride", "max_accepted"), "i32"),
            "window": x,
        },
        {"KERNEL": kernel, "BLOCK_C": tiles.COMMIT_CHANNELS},
    )
