"""Combine: merge a row's split-KV partial results by their log-sum-exps.

One program per (row, KV head): the query heads of the group. Rows attended by one work item
pass through unchanged but for the rounding; rows of no item (padding) get zeros.
"""

import triton
import triton.language as tl

from trtree.plugins.tree_attention.kernels.numerics import round_to


@triton.jit
def tree_attention_combine_kernel(
    partial_out,  # float32 [items, kv_heads, BLOCK_M, HEAD_DIM]
    partial_lse,  # float32 [items, kv_heads, BLOCK_M], base 2
    row_splits,  # int32 [rows, 3]: first item, number of items, row within the tile
    out,  # [rows, kv_heads * GROUP, HEAD_DIM]
    lse,  # float32 [rows, kv_heads * GROUP], natural
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits merged at a time
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    first = tl.load(row_splits + row * 3).to(tl.int64)
    splits = tl.load(row_splits + row * 3 + 1)
    tile_lane = tl.load(row_splits + row * 3 + 2) * GROUP

    GROUP_PAD: tl.constexpr = triton.next_power_of_2(GROUP)
    DIM_PAD: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    top = tl.full([GROUP_PAD], -1e30, tl.float32)  # finite: see attention.py
    total = tl.zeros([GROUP_PAD], tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        inside = (split < splits)[:, None] & (member < GROUP)[None, :]
        partial = ((first + split) * kv_heads + kv_head)[:, None] * BLOCK_M + tile_lane + member
        part_lse = tl.load(partial_lse + partial, mask=inside, other=float("-inf"))
        part = tl.load(
            partial_out + partial[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=inside[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        weight = tl.exp2(part_lse - new_top[None, :])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weight, 0)
        acc = acc * keep[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = new_top

    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    head = (row * kv_heads + kv_head) * GROUP + member
    live = member < GROUP
    tl.store(
        out + head[:, None] * HEAD_DIM + dim[None, :],
        round_to(acc / divisor[:, None], out.dtype.element_ty),
        mask=live[:, None] & (dim < HEAD_DIM)[None, :],
    )
    LN2: tl.constexpr = 0.6931471805599453
    natural = tl.where(seen, (top + tl.log2(divisor)) * LN2, float("-inf"))
    tl.store(lse + head, natural, mask=live)
