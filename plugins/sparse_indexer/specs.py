"""The indexer's kernels as they are compiled ahead of time, per SM."""

import torch

from trtree.plugins.sparse_indexer.kernels.scores import index_scores_kernel
from trtree.plugins.sparse_indexer.kernels.top_k import index_top_k_kernel
from trtree.plugins.sparse_indexer.tiles import TOP_K_BLOCK, TOP_K_WARPS, index_tile
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.specs import DOT_TYPES, TRITON_TYPES


def scores_spec(
    heads: int, dim: int, page_size: int, rows: int, sm: int, dtype: torch.dtype = torch.bfloat16
) -> KernelSpec:
    """``rows``: of one request, the verify width."""
    x = f"*{TRITON_TYPES[dtype]}"
    tile = index_tile(sm, rows, heads)
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
            "DIM": dim,
            "HEADS": heads,
            "PAGE_SIZE": page_size,
            "DOT_DTYPE": DOT_TYPES[dtype],
            "ROWS": tile.rows,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        head_dim=dim,
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
