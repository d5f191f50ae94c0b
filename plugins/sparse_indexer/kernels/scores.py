"""Index scores: one program per work item, a tile of a request's rows and a range of its keys.

The index heads of a row are rows of one tile, so that a key is read once per tile; their sum
leaves one score per row and key. A key that its row does not see scores -inf, a seen one
never: the choice behind needs no mask. The constant (index_heads * dim)^-0.5 changes no order
and is left out.
"""

import triton
import triton.language as tl

from trtree.plugins.tree_attention.kernels.attention import (
    KEY_BEGIN,
    KEY_END,
    PREFIX,
    REQUEST,
    TILE_ROW,
    TILE_ROWS,
    WORK_FIELDS,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def index_scores_kernel(
    q,  # [rows, HEADS, DIM]
    weights,  # float32 [rows, HEADS]
    cache,  # [pages, PAGE_SIZE, DIM]
    page_table,  # int32 [requests, table_width]
    packed_mask,  # int32 [rows, mask_words]
    work,  # int32 [items, WORK_FIELDS]
    table_width,
    mask_words,
    width,
    scores,  # float32 [rows, width], by slot
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a tile, a power of two
    BLOCK_N: tl.constexpr,
):
    field = work + tl.program_id(0).to(tl.int64) * WORK_FIELDS
    tile_rows = tl.load(field + TILE_ROWS)
    if tile_rows == 0:
        return
    tile_row = tl.load(field + TILE_ROW)
    prefix = tl.load(field + PREFIX)
    end = tl.load(field + KEY_END)
    pages = page_table + tl.load(field + REQUEST).to(tl.int64) * table_width

    HEADS_PAD: tl.constexpr = triton.next_power_of_2(HEADS)
    BLOCK_M: tl.constexpr = ROWS * HEADS_PAD
    dim = tl.arange(0, triton.next_power_of_2(DIM))
    lane = tl.arange(0, BLOCK_M)
    head = lane % HEADS_PAD
    live = (lane // HEADS_PAD < tile_rows) & (head < HEADS)
    query = (tile_row + lane // HEADS_PAD).to(tl.int64) * HEADS + head
    q_tile = tl.load(
        q + query[:, None] * DIM + dim[None, :],
        mask=live[:, None] & (dim < DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    weight = tl.load(weights + query, mask=live, other=0.0)

    member = tl.arange(0, ROWS)
    row = (tile_row + member).to(tl.int64)
    row_live = (member < tile_rows)[:, None]
    column = tl.arange(0, BLOCK_N)
    for start in range(tl.load(field + KEY_BEGIN), end, BLOCK_N):
        slot = start + column
        inside = slot < end
        page = tl.load(pages + slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = (page * PAGE_SIZE + slot % PAGE_SIZE) * DIM
        keys = tl.load(
            cache + place[:, None] + dim[None, :],
            mask=inside[:, None] & (dim < DIM)[None, :],
            other=0.0,
        ).to(DOT_DTYPE)
        products = tl.dot(q_tile, tl.trans(keys), input_precision="ieee")
        # Not tl.maximum, which would make NaN zero.
        products = tl.where(products < 0.0, 0.0, products) * weight[:, None]
        score = tl.sum(tl.reshape(products, (ROWS, HEADS_PAD, BLOCK_N)), 1)
        score = tl.where(score == float("-inf"), LOWEST, score)

        tree_row = slot - prefix
        in_tree = row_live & inside[None, :] & (tree_row >= 0)[None, :]
        words = packed_mask + row[:, None] * mask_words + (tree_row // 32)[None, :]
        word = tl.load(words, mask=in_tree, other=-1)
        seen = ((word >> (tree_row & 31)[None, :]) & 1) == 1
        tl.store(
            scores + row[:, None] * width + slot[None, :],
            tl.where(seen, score, float("-inf")),
            mask=row_live & inside[None, :],
        )
