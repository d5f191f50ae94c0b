"""Launches the kernels on torch tensors: a GPU's, or the CPU's under Triton's interpreter.

``TRITON_INTERPRET=1`` must be set before ``triton`` is first imported; Triton decides then.
"""

import math

import torch
import triton

from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.mla_attention.kernels.append import latent_append_kernel
from trtree.plugins.mla_attention.kernels.attention import latent_tree_attention_kernel
from trtree.plugins.mla_attention.tiles import APPEND_ROWS, LatentTile
from trtree.plugins.tree_attention.contract import Rope
from trtree.plugins.tree_attention.kernels.combine import tree_attention_combine_kernel
from trtree.plugins.tree_attention.launch import dot_dtype
from trtree.plugins.tree_attention.plan import AttentionPlan, RowTables
from trtree.plugins.tree_attention.tiles import combine_splits, combine_warps


def append(
    q: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    tables: RowTables,
    cache: LatentCache,
    rope: Rope | None,
    *,
    rotary_start: int = 0,
    rows_per_program: int = APPEND_ROWS,
) -> torch.Tensor:
    """Turn q and x from element ``rotary_start`` on, write x to the cache; returns the turned
    q (q itself without RoPE, where both come turned).

    q [rows, heads, dim], x [rows, dim] of the cache's type, all contiguous.
    """
    rows, dim = x.shape
    q_out = torch.empty_like(q) if rope else q
    grid = (triton.cdiv(rows, rows_per_program), 1 + (q.shape[1] if rope else 0))
    latent_append_kernel[grid](
        q,
        x,
        rope.cos_sin if rope else q,
        positions,
        tables.slots,
        tables.requests,
        tables.page_table,
        tables.page_table.shape[1],
        rows,
        q_out,
        cache.vectors,
        DIM=dim,
        PAGE_SIZE=cache.page_size,
        ROTARY_START=rotary_start,
        ROTARY_DIM=rope.rotary_dim if rope else 0,
        INTERLEAVED=rope.interleaved if rope else False,
        ROWS=rows_per_program,
    )
    return q_out


def latent_attention(
    q: torch.Tensor,
    packed_mask: torch.Tensor,
    plan: AttentionPlan,
    page_table: torch.Tensor,
    cache: LatentCache,
    selection: torch.Tensor | None,
    tile: LatentTile,
    *,
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [rows, heads, dim] -> [rows, heads, value_dim] in q's type, and log-sum-exps float32
    [rows, heads].

    selection: int32 [rows, top_k], contiguous, as ``index_select`` leaves it. ``plan`` must
    have been made with ``tile`` and its top_k.
    """
    rows, heads, dim = q.shape
    blocks = heads // tile.group
    partial = (plan.num_items, blocks, tile.block_m)
    partial_out = torch.empty(*partial, value_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(partial, dtype=torch.float32, device=q.device)
    latent_tree_attention_kernel[(plan.num_items, blocks)](
        q,
        cache.vectors,
        page_table,
        packed_mask,
        plan.work if selection is None else selection,
        plan.work,
        page_table.shape[1],
        packed_mask.shape[1],
        0 if selection is None else selection.shape[1],
        partial_out,
        partial_lse,
        VALUE_DIM=value_dim,
        ROPE_DIM=dim - value_dim,
        GROUP=tile.group,
        PAGE_SIZE=cache.page_size,
        SCALE_LOG2=scale * math.log2(math.e),
        SELECTED=selection is not None,
        DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    out = q.new_empty(rows, heads, value_dim)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    # A block of heads stands where tree attention has a KV head and its group.
    tree_attention_combine_kernel[(rows, blocks)](
        partial_out,
        partial_lse,
        plan.row_splits,
        out,
        lse,
        HEAD_DIM=value_dim,
        GROUP=tile.group,
        BLOCK_M=tile.block_m,
        BLOCK_S=combine_splits(tile.group, value_dim),
        num_warps=combine_warps(tile.group, value_dim),
    )
    return out, lse
