"""The kernels as they are compiled ahead of time."""

from dataclasses import dataclass

import torch

from trtree.plugins.gated_delta_net import tiles
from trtree.plugins.gated_delta_net.kernels.commit import gated_delta_commit_kernel
from trtree.plugins.gated_delta_net.kernels.decay import gated_delta_decay_kernel
from trtree.plugins.gated_delta_net.kernels.delta import gated_delta_net_kernel
from trtree.plugins.gated_delta_net.reference import UNIT_EPS
from trtree.plugins.tree_attention.aot import KernelSpec

TRITON_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class DeltaConfig:
    """What a layer's kernels are specialized to. group: value heads per key head."""

    key_dim: int
    value_dim: int
    heads: int
    group: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name, size in (("key_dim", self.key_dim), ("value_dim", self.value_dim)):
            if size not in tiles.HEAD_DIMS:
                known = ", ".join(map(str, tiles.HEAD_DIMS))
                raise ValueError(f"{name} {size}: gated_delta_net's kernels take {known}")

    @property
    def pointer(self) -> str:
        return f"*{TRITON_TYPES[self.dtype]}"


def decay_spec(layer: DeltaConfig) -> KernelSpec:
    return KernelSpec(
        "gated_delta_decay",
        gated_delta_decay_kernel,
        {
            "a": layer.pointer,
            "gates": "*fp32",
            "packed_mask": "*i32",
            "requests": "*i32",
            "a_stride": "i32",
            "mask_words": "i32",
            "decay": "*fp32",
        },
        {
            "HEADS": layer.heads,
            "HEADS_PAD": tiles.head_columns(layer.heads),
            "BLOCK": tiles.DECAY_ROWS,
        },
        num_warps=tiles.WARPS,
        num_stages=tiles.DECAY_STAGES,
        head_dim=layer.key_dim,
    )


def delta_spec(layer: DeltaConfig, sm: int) -> KernelSpec:
    return KernelSpec(
        "gated_delta_net",
        gated_delta_net_kernel,
        {
            **dict.fromkeys(("q", "k", "v", "b"), layer.pointer),
            "decay": "*fp32",
            "packed_mask": "*i32",
            "requests": "*i32",
            "state": "*fp32",
            **dict.fromkeys(("q_stride", "k_stride", "v_stride", "b_stride", "mask_words"), "i32"),
            "update": "*fp32",
            "out": layer.pointer,
        },
        {
            **_sizes(layer),
            "SCALE": layer.key_dim**-0.5,
            "BLOCK": tiles.ROWS,
            "BLOCK_K": tiles.key_columns(sm),
        },
        num_warps=tiles.WARPS,
        num_stages=tiles.STAGES,
        head_dim=layer.key_dim,
    )


def commit_spec(layer: DeltaConfig) -> KernelSpec:
    return KernelSpec(
        "gated_delta_commit",
        gated_delta_commit_kernel,
        {
            "k": layer.pointer,
            "update": "*fp32",
            "decay": "*fp32",
            **dict.fromkeys(("requests", "accepted", "num_accepted"), "*i32"),
            **dict.fromkeys(("k_stride", "max_accepted"), "i32"),
            "state": "*fp32",
        },
        {**_sizes(layer), "BLOCK": tiles.COMMIT_ROWS},
        num_warps=tiles.commit_warps(layer.key_dim),
        num_stages=tiles.STAGES,
        head_dim=layer.key_dim,
    )


def _sizes(layer: DeltaConfig) -> dict[str, float]:
    return {
        "KEY_DIM": layer.key_dim,
        "VALUE_DIM": layer.value_dim,
        "GROUP": layer.group,
        "EPS": UNIT_EPS,
        "BLOCK_V": tiles.VALUE_COLUMNS,
    }
