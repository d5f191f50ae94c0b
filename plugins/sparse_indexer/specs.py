"""The indexer's kernels as they are compiled ahead of time, per SM."""

from dataclasses import dataclass

import torch

from trtree.plugins.sparse_indexer.kernels.scores import index_scores_kernel
from trtree.plugins.sparse_indexer.kernels.top_k import index_top_k_kernel
from trtree.plugins.sparse_indexer.tiles import TOP_K_BLOCK, TOP_K_WARPS, index_tile
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.specs import DOT_TYPES, TRITON_TYPES


@dataclass(frozen=True)
class IndexLayer:
    """What a layer's scores are specialized to. ``rows``: of one request, the verify width."""

    heads: int
    dim: int
    page_size: int
    rows: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class TopKLayer:
    """The one kernel of the choice serves all layers; ``top_k`` is an argument."""

    top_k: int


def scores_spec(layer: IndexLayer, sm: int) -> KernelSpec:
    x = f"*{TRITON_TYPES[layer.dtype]}"
    tile = index_tile(sm, layer.rows, layer.heads)
    return KernelSpec(
        "index_scores",
        index_scores_kernel,
        {
            "q": x,
            "weights": "*fp32",
            "cache": x,
            "page_table": "*i32",
            "packed_mask": "*i32",
            "work": "*i32",
            "table_width": "i32",
            "mask_words": "i32",
            "width": "i32",
            "scores": "*fp32",
        },
        {
            "DIM": layer.dim,
            "HEADS": layer.heads,
            "PAGE_SIZE": layer.page_size,
            "DOT_DTYPE": DOT_TYPES[layer.dtype],
            "ROWS": tile.rows,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        head_dim=layer.dim,
    )


def top_k_spec() -> KernelSpec:
    return KernelSpec(
        "index_top_k",
        index_top_k_kernel,
        {
            "scores": "*fp32",
            "lengths": "*i32",
            "width": "i32",
            "top_k": "i32",
            "selection": "*i32",
            "nan_counts": "*i32",
        },
        {"BLOCK": TOP_K_BLOCK},
        num_warps=TOP_K_WARPS,
    )
