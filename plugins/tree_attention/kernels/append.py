"""Append: turn q and k by RoPE, write k and v to their pages.

One program per (few rows, KV head): their query heads of the group, keys and values.
The angle follows the row's position, which is its depth in the tree; the place in the
cache follows its slot, which is its number. Siblings share the first, never the second.
"""

import triton
import triton.language as tl

from trtree.plugins.tree_attention.kernels.numerics import round_to


@triton.jit
def tree_kv_append_kernel(
    q,  # [rows, kv_heads * GROUP, HEAD_DIM]
    k,  # [rows, kv_heads, HEAD_DIM]
    v,  # [rows, kv_heads, HEAD_DIM]
    cos_sin,  # float32 [positions, ROTARY_DIM]: the cosines, then the sines
    positions,  # int32 [rows]
    slots,  # int32 [rows]
    requests,  # int32 [rows], -1: padding row
    page_table,  # int32 [requests, table_width]
    k_scale,  # float32 [kv_heads], read if the cache is FP8
    v_scale,  # float32 [kv_heads], likewise
    table_width,
    num_rows,
    q_out,  # [rows, kv_heads * GROUP, HEAD_DIM], written if ROTARY_DIM > 0
    k_cache,  # [pages, PAGE_SIZE, kv_heads, HEAD_DIM]
    v_cache,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.load(requests + row, mask=row < num_rows, other=-1).to(tl.int64)
    live = request >= 0
    slot = tl.load(slots + row, mask=live, other=0)
    page = tl.load(page_table + request * table_width + slot // PAGE_SIZE, mask=live, other=0)
    cache_row = page.to(tl.int64) * PAGE_SIZE + slot % PAGE_SIZE
    target = (cache_row * kv_heads + kv_head)[:, None] * HEAD_DIM
    source = (row.to(tl.int64) * kv_heads + kv_head)[:, None] * HEAD_DIM

    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    inside = live[:, None] & (dim < HEAD_DIM)
    value = tl.load(v + source + dim, mask=inside, other=0.0)
    _store_kv(v_cache + target + dim, value, v_scale + kv_head, inside)

    if ROTARY_DIM > 0:
        pair = tl.arange(0, triton.next_power_of_2(ROTARY_DIM // 2))[None, :]
        if INTERLEAVED:
            first = 2 * pair
            second = first + 1
        else:
            first = pair
            second = pair + ROTARY_DIM // 2
        turning = live[:, None] & (pair < ROTARY_DIM // 2)
        still = inside & (dim >= ROTARY_DIM)
        position = tl.load(positions + row, mask=live, other=0).to(tl.int64)
        angle = cos_sin + position[:, None] * ROTARY_DIM + pair
        cos = tl.load(angle, mask=turning, other=1.0)
        sin = tl.load(angle + ROTARY_DIM // 2, mask=turning, other=0.0)

        a, b = _turn(k + source + first, k + source + second, cos, sin, turning)
        _store_kv(k_cache + target + first, a, k_scale + kv_head, turning)
        _store_kv(k_cache + target + second, b, k_scale + kv_head, turning)
        if ROTARY_DIM < HEAD_DIM:
            rest = tl.load(k + source + dim, mask=still, other=0.0)
            _store_kv(k_cache + target + dim, rest, k_scale + kv_head, still)

        for member in range(GROUP):
            head = source * GROUP + member * HEAD_DIM
            x = q + head
            y = q_out + head
            a, b = _turn(x + first, x + second, cos, sin, turning)
            tl.store(y + first, a, mask=turning)
            tl.store(y + second, b, mask=turning)
            if ROTARY_DIM < HEAD_DIM:
                tl.store(y + dim, tl.load(x + dim, mask=still), mask=still)
    else:
        key = tl.load(k + source + dim, mask=inside, other=0.0)
        _store_kv(k_cache + target + dim, key, k_scale + kv_head, inside)


@triton.jit
def _turn(first, second, cos, sin, mask):
    """Rotate the pairs at two pointers; rounded to the activations' type, as the graph does."""
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = first.dtype.element_ty
    return round_to(a * cos - b * sin, dtype), round_to(b * cos + a * sin, dtype)


@triton.jit
def _store_kv(pointers, x, scale, mask):
    dtype: tl.constexpr = pointers.dtype.element_ty
    wide = x.to(tl.float32)
    if dtype == tl.float8e4nv:
        # IEEE division: the plain one is off by up to 2 ulp on the GPU.
        wide = tl.div_rn(wide, tl.load(scale) + tl.zeros_like(wide))
    tl.store(pointers, round_to(wide, dtype), mask=mask)
