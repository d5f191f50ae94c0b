"""Launches the kernels on torch tensors: a GPU's, or the CPU's under Triton's interpreter.

``TRITON_INTERPRET=1`` must be set before ``triton`` is first imported; Triton decides then.
"""

import torch

from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.sparse_indexer.kernels.scores import index_scores_kernel
from trtree.plugins.sparse_indexer.kernels.top_k import index_top_k_kernel
from trtree.plugins.sparse_indexer.tiles import TOP_K_BLOCK, TOP_K_WARPS, IndexTile
from trtree.plugins.tree_attention.launch import dot_dtype
from trtree.plugins.tree_attention.plan import AttentionPlan


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    packed_mask: torch.Tensor,
    plan: AttentionPlan,
    page_table: torch.Tensor,
    cache: LatentCache,
    tile: IndexTile,
    *,
    width: int,
) -> torch.Tensor:
    """q [rows, index_heads, dim], float32 weights [rows, index_heads] -> float32 [rows, width].

    By slot, without the constant factor; -inf where the row does not see the key. What lies
    past a row's request is left unset. ``plan`` must have been made with ``tile``.
    """
    rows, heads, dim = q.shape
    scores = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    index_scores_kernel[(plan.num_items,)](
        q,
        weights,
        cache.vectors,
        page_table,
        packed_mask,
        plan.work,
        page_table.shape[1],
        packed_mask.shape[1],
        width,
        scores,
        DIM=dim,
        HEADS=heads,
        PAGE_SIZE=cache.page_size,
        DOT_DTYPE=dot_dtype(q.dtype),
        ROWS=tile.rows,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return scores


def index_top_k(
    scores: torch.Tensor, lengths: torch.Tensor, top_k: int, *, block: int = TOP_K_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scores [rows, width] -> int32 selection [rows, top_k], and how many NaN stood
    among each row's scores, int32 [rows]: where there are any, the selection is not to be used.

    lengths: int32 [rows], at most width; -inf scores are never chosen.
    """
    rows, width = scores.shape
    selection = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device)
    nan_counts = torch.empty(rows, dtype=torch.int32, device=scores.device)
    index_top_k_kernel[(rows,)](
        scores, lengths, width, top_k, selection, nan_counts, BLOCK=block, num_warps=TOP_K_WARPS
    )
    return selection, nan_counts
