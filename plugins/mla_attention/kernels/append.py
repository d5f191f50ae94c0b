"""Append: turn queries and the step's vectors by RoPE, write the vectors to their pages.

One program per (few rows, vector): the first writes the rows' one key vector to the cache,
each of the others turns one query head. The latent's rotated part stands behind its value
(ROTARY_START = value_dim), an indexer key's at its front. The angle follows the row's
position, which siblings share; the place in the cache its slot, which they never do.
"""

import triton
import triton.language as tl

from trtree.plugins.tree_attention.kernels.append import _turn


@triton.jit
def latent_append_kernel(
    q,  # [rows, heads, DIM]
    x,  # [rows, DIM]
    cos_sin,  # float32 [positions, ROTARY_DIM]: the cosines, then the sines
    positions,  # int32 [rows]
    slots,  # int32 [rows]
    requests,  # int32 [rows], -1: padding row
    page_table,  # int32 [requests, table_width]
    table_width,
    num_rows,
    q_out,  # [rows, heads, DIM], written if ROTARY_DIM > 0
    cache,  # [pages, PAGE_SIZE, DIM], of x's type
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTARY_START: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # 0: the vectors come turned, and there is one program per rows
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    vector = tl.program_id(1)
    heads = tl.num_programs(1) - 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.load(requests + row, mask=row < num_rows, other=-1).to(tl.int64)
    live = request >= 0
    if vector == 0:
        slot = tl.load(slots + row, mask=live, other=0)
        page = tl.load(page_table + request * table_width + slot // PAGE_SIZE, mask=live, other=0)
        source = x + row.to(tl.int64) * DIM
        target = cache + (page.to(tl.int64) * PAGE_SIZE + slot % PAGE_SIZE) * DIM
    else:
        place = (row.to(tl.int64) * heads + vector - 1) * DIM
        source = q + place
        target = q_out + place

    source = source[:, None]
    target = target[:, None]
    dim = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    still = live[:, None] & (dim < DIM)
    if ROTARY_DIM > 0:
        still &= (dim < ROTARY_START) | (dim >= ROTARY_START + ROTARY_DIM)
        pair = tl.arange(0, triton.next_power_of_2(ROTARY_DIM // 2))[None, :]
        if INTERLEAVED:
            first = ROTARY_START + 2 * pair
            second = first + 1
        else:
            first = ROTARY_START + pair
            second = first + ROTARY_DIM // 2
        turning = live[:, None] & (pair < ROTARY_DIM // 2)
        position = tl.load(positions + row, mask=live, other=0).to(tl.int64)
        angle = cos_sin + position[:, None] * ROTARY_DIM + pair
        cos = tl.load(angle, mask=turning, other=1.0)
        sin = tl.load(angle + ROTARY_DIM // 2, mask=turning, other=0.0)
        a, b = _turn(source + first, source + second, cos, sin, turning)
        tl.store(target + first, a, mask=turning)
        tl.store(target + second, b, mask=turning)
    tl.store(target + dim, tl.load(source + dim, mask=still), mask=still)
