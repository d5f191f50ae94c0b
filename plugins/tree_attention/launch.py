"""Launches the kernels on torch tensors: a GPU's, or the CPU's under Triton's interpreter.

``TRITON_INTERPRET=1`` must be set before ``triton`` is first imported; Triton decides then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trtree.plugins.tree_attention.contract import PagedKv, Rope
from trtree.plugins.tree_attention.kernels.append import tree_kv_append_kernel
from trtree.plugins.tree_attention.kernels.attention import tree_attention_kernel
from trtree.plugins.tree_attention.kernels.combine import tree_attention_combine_kernel
from trtree.plugins.tree_attention.kernels.commit import tree_kv_commit_kernel
from trtree.plugins.tree_attention.plan import AttentionPlan, RowTables
from trtree.plugins.tree_attention.tiles import (
    APPEND_ROWS,
    COMMIT_ROWS,
    Tile,
    combine_splits,
    commit_columns,
)

_TL_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    tables: RowTables,
    cache: PagedKv,
    rope: Rope | None,
    *,
    rows_per_program: int = APPEND_ROWS,
) -> torch.Tensor:
    """Turn q and k, write k and v to the cache; returns the turned q (q itself without RoPE).

    q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], all contiguous.
    """
    rows, kv_heads, head_dim = k.shape
    q_out = torch.empty_like(q) if rope else q
    k_scale, v_scale = _scales(cache)
    tree_kv_append_kernel[(triton.cdiv(rows, rows_per_program), kv_heads)](
        q,
        k,
        v,
        rope.cos_sin if rope else q,
        positions,
        tables.slots,
        tables.requests,
        tables.page_table,
        k_scale,
        v_scale,
        tables.page_table.shape[1],
        rows,
        q_out,
        cache.k,
        cache.v,
        HEAD_DIM=head_dim,
        GROUP=q.shape[1] // kv_heads,
        PAGE_SIZE=cache.page_size,
        ROTARY_DIM=rope.rotary_dim if rope else 0,
        INTERLEAVED=rope.interleaved if rope else False,
        ROWS=rows_per_program,
    )
    return q_out


def tree_attention(
    q: torch.Tensor,
    packed_mask: torch.Tensor,
    positions: torch.Tensor,
    plan: AttentionPlan,
    page_table: torch.Tensor,
    cache: PagedKv,
    tile: Tile,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [rows, heads, head_dim] -> the same shape, and log-sum-exps float32 [rows, heads].

    ``plan`` must have been made with ``tile.block_m``.
    """
    rows, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    partial = (plan.num_items, kv_heads, tile.block_m)
    partial_out = torch.empty(*partial, head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(partial, dtype=torch.float32, device=q.device)
    k_scale, v_scale = _scales(cache)
    tree_attention_kernel[(plan.num_items, kv_heads)](
        q,
        cache.k,
        cache.v,
        page_table,
        packed_mask,
        positions,
        plan.work,
        k_scale,
        v_scale,
        page_table.shape[1],
        packed_mask.shape[1],
        partial_out,
        partial_lse,
        HEAD_DIM=head_dim,
        GROUP=heads // kv_heads,
        PAGE_SIZE=cache.page_size,
        SCALE_LOG2=scale * math.log2(math.e),
        WINDOW=window or 0,
        DOT_DTYPE=dot_dtype(q.dtype),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        TAIL_STAGES=tile.tail_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    tree_attention_combine_kernel[(rows, kv_heads)](
        partial_out,
        partial_lse,
        plan.row_splits,
        out,
        lse,
        HEAD_DIM=head_dim,
        GROUP=heads // kv_heads,
        BLOCK_M=tile.block_m,
        BLOCK_S=combine_splits(heads // kv_heads, head_dim),
    )
    return out, lse


@dataclass(frozen=True)
class KvStores:
    """All layers' caches as commit sees them; made once, as the caches never move.

    addresses: int64 [2 * layers], of each k and v store, on their device.
    """

    addresses: torch.Tensor
    page_size: int
    row_words: int  # 32-bit words of a slot

    @classmethod
    def of(cls, caches: Sequence[PagedKv]) -> "KvStores":
        """Raises ValueError where the caches differ in shape or type."""
        return cls.of_tensors([store for cache in caches for store in (cache.k, cache.v)])

    @classmethod
    def of_tensors(cls, stores: Sequence[torch.Tensor]) -> "KvStores":
        """Stores [pages, page_size, ...] one by one, such as latent caches."""
        kinds = {(tuple(store.shape), str(store.dtype)) for store in stores}
        if len(kinds) != 1:
            raise ValueError(
                "commit moves all layers in one launch, but their KV caches differ: "
                f"{sorted(kinds)}"
            )
        first = stores[0]
        addresses = [store.data_ptr() for store in stores]
        return cls(
            torch.tensor(addresses, dtype=torch.int64, device=first.device),
            first.shape[1],
            first[0, 0].numel() * first.element_size() // 4,
        )


def commit(
    stores: KvStores,
    tables: RowTables,
    accepted: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Move every layer's accepted rows behind the prefix, in one launch.

    accepted int32 [requests, n], strictly increasing rows of the request (root included),
    of which the first num_accepted int32 [requests] count.
    """
    columns = commit_columns(stores.row_words)
    grid = (len(stores.addresses), len(num_accepted), triton.cdiv(stores.row_words, columns))
    tree_kv_commit_kernel[grid](
        stores.addresses,
        tables.page_table,
        tables.prefix_lengths,
        accepted,
        num_accepted,
        tables.page_table.shape[1],
        accepted.shape[1],
        PAGE_SIZE=stores.page_size,
        ROW_WORDS=stores.row_words,
        BLOCK_R=COMMIT_ROWS,
        BLOCK_C=columns,
    )


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """The tensor cores' operand type. Interpreted bfloat16 products are garbage and float16
    ones slow; float32 holds every value of both exactly."""
    if triton.knobs.runtime.interpret:
        return tl.float32
    return _TL_TYPES[dtype]


def _scales(cache: PagedKv) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels take scales always and read them for FP8 alone."""
    if cache.k_scale is None or cache.v_scale is None:
        return cache.k, cache.v
    return cache.k_scale, cache.v_scale
