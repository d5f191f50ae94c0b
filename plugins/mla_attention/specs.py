"""The kernels of latent attention as they are compiled ahead of time, per SM."""

import math
from dataclasses import dataclass

import torch

from trtree.plugins.mla_attention.kernels.append import latent_append_kernel
from trtree.plugins.mla_attention.kernels.attention import latent_tree_attention_kernel
from trtree.plugins.mla_attention.tiles import APPEND_ROWS, latent_tile
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.kernels.combine import tree_attention_combine_kernel
from trtree.plugins.tree_attention.specs import DOT_TYPES, TRITON_TYPES
from trtree.plugins.tree_attention.tiles import combine_splits, combine_warps


@dataclass(frozen=True)
class LatentLayer:
    """What a layer's kernels are specialized to. ``rows``: of one request, the verify width;
    ``heads``: of one rank."""

    heads: int
    value_dim: int
    rope_dim: int
    page_size: int
    rows: int
    scale: float
    selected: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def dim(self) -> int:
        return self.value_dim + self.rope_dim

    @property
    def suffix(self) -> str:
        return "_selected" if self.selected else ""


@dataclass(frozen=True)
class AppendLayer:
    """What append is specialized to: vectors of ``dim`` numbers, of which ``rotary_dim`` from
    ``rotary_start`` on are turned, and so are ``heads`` queries alike. rotary_dim 0: all come
    turned, and no query is looked at."""

    dim: int
    heads: int
    page_size: int
    rotary_start: int
    rotary_dim: int
    interleaved: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def turned_heads(self) -> int:
        return self.heads if self.rotary_dim else 0


def append_spec(layer: AppendLayer) -> KernelSpec:
    x = f"*{TRITON_TYPES[layer.dtype]}"
    return KernelSpec(
        "latent_append",
        latent_append_kernel,
        {
            "q": x,
            "x": x,
            "cos_sin": "*fp32",
            "positions": "*i32",
            "slots": "*i32",
            "requests": "*i32",
            "page_table": "*i32",
            "table_width": "i32",
            "num_rows": "i32",
            "q_out": x,
            "cache": x,
        },
        {
            "DIM": layer.dim,
            "PAGE_SIZE": layer.page_size,
            "ROTARY_START": layer.rotary_start,
            "ROTARY_DIM": layer.rotary_dim,
            "INTERLEAVED": layer.interleaved,
            "ROWS": APPEND_ROWS,
        },
        head_dim=layer.dim,
    )


def attention_spec(layer: LatentLayer, sm: int) -> KernelSpec:
    x = f"*{TRITON_TYPES[layer.dtype]}"
    tile = latent_tile(sm, layer.rows, layer.heads, selected=layer.selected)
    return KernelSpec(
        f"latent_tree_attention{layer.suffix}",
        latent_tree_attention_kernel,
        {
            "q": x,
            "cache": x,
            "page_table": "*i32",
            "packed_mask": "*i32",
            "selection": "*i32",
            "work": "*i32",
            "table_width": "i32",
            "mask_words": "i32",
            "selection_width": "i32",
            "partial_out": "*fp32",
            "partial_lse": "*fp32",
        },
        {
            "VALUE_DIM": layer.value_dim,
            "ROPE_DIM": layer.rope_dim,
            "GROUP": tile.group,
            "PAGE_SIZE": layer.page_size,
            "SCALE_LOG2": layer.scale * math.log2(math.e),
            "SELECTED": layer.selected,
            "DOT_DTYPE": DOT_TYPES[layer.dtype],
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        head_dim=layer.dim,
    )


def combine_spec(layer: LatentLayer, sm: int) -> KernelSpec:
    tile = latent_tile(sm, layer.rows, layer.heads, selected=layer.selected)
    return KernelSpec(
        f"latent_combine{layer.suffix}",
        tree_attention_combine_kernel,
        {
            "partial_out": "*fp32",
            "partial_lse": "*fp32",
            "row_splits": "*i32",
            "out": f"*{TRITON_TYPES[layer.dtype]}",
            "lse": "*fp32",
        },
        {
            "HEAD_DIM": layer.value_dim,
            "GROUP": tile.group,
            "BLOCK_M": tile.block_m,
            "BLOCK_S": combine_splits(tile.group, layer.value_dim),
        },
        num_warps=combine_warps(tile.group, layer.value_dim),
        head_dim=layer.dim,
    )
