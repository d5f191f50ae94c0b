"""Split-KV latent tree attention: one program per (work item, block of query heads).

All query heads share one latent per token, which is key and value at once: it is loaded
once per step and used for both products. The first VALUE_DIM elements are the value; the
rotated key of ROPE_DIM elements behind them takes part in the scores alone. A program's heads
are rows of one tile (GROUP * rows, head fastest).

Without a selection an item is a range of slots, as in tree_attention/kernels/attention.py:
no mask before the tree, one mask word per row in it. With one, an item is one row and a range
of its list; the list holds visible slots alone, so that only its end is looked at.
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
from trtree.plugins.tree_attention.kernels.softmax import (
    accumulate,
    finished,
    nothing_yet,
    tail_begin,
    tail_visible,
    whole_blocks,
)


@triton.jit
def latent_tree_attention_kernel(
    q,  # [rows, head_blocks * GROUP, VALUE_DIM + ROPE_DIM]
    cache,  # [pages, PAGE_SIZE, VALUE_DIM + ROPE_DIM]
    page_table,  # int32 [requests, table_width]
    packed_mask,  # int32 [rows, mask_words]
    selection,  # int32 [rows, selection_width]: slots, -1 behind them; read if SELECTED
    work,  # int32 [items, WORK_FIELDS]
    table_width,
    mask_words,
    selection_width,
    partial_out,  # float32 [items, head_blocks, BLOCK_M, VALUE_DIM]
    partial_lse,  # float32 [items, head_blocks, BLOCK_M], base 2
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a program
    PAGE_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,  # softmax scale * log2(e): the softmax runs in base 2
    SELECTED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    field = work + item * WORK_FIELDS
    tile_rows = tl.load(field + TILE_ROWS)
    if tile_rows == 0:
        return
    tile_row = tl.load(field + TILE_ROW)
    prefix = tl.load(field + PREFIX)
    begin = tl.load(field + KEY_BEGIN)
    end = tl.load(field + KEY_END)
    pages = page_table + tl.load(field + REQUEST).to(tl.int64) * table_width

    DIM: tl.constexpr = VALUE_DIM + ROPE_DIM
    lane = tl.arange(0, BLOCK_M)
    row = tile_row + lane // GROUP
    live = lane // GROUP < tile_rows
    head = block * GROUP + lane % GROUP
    queries = q + (row.to(tl.int64) * blocks * GROUP + head) * DIM
    q_latent = _load_part(queries, live, 0, VALUE_DIM, DOT_DTYPE)
    q_rope = _load_part(queries, live, VALUE_DIM, ROPE_DIM, DOT_DTYPE)

    acc = tl.zeros([BLOCK_M, triton.next_power_of_2(VALUE_DIM)], tl.float32)
    top, total = nothing_yet(BLOCK_M)

    if SELECTED:
        chosen = selection + tile_row.to(tl.int64) * selection_width
        column = tl.arange(0, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
            slot = tl.load(chosen + start + column, mask=start + column < end, other=-1)
            inside = slot >= 0
            keys = _latent_rows(cache, pages, slot, inside, PAGE_SIZE, DIM)
            latent = _load_part(keys, inside, 0, VALUE_DIM, DOT_DTYPE)
            rope = _load_part(keys, inside, VALUE_DIM, ROPE_DIM, DOT_DTYPE)
            scores = _scores(q_latent, q_rope, latent, rope) * SCALE_LOG2
            scores = tl.where(inside[None, :], scores, float("-inf"))
            acc, top, total = accumulate(acc, top, total, scores, latent)
    else:
        # The committed prefix, whole blocks: no mask.
        whole_end = whole_blocks(begin, end, prefix, BLOCK_N)
        column = tl.arange(0, BLOCK_N)
        for start in range(begin, whole_end, BLOCK_N):
            slot = start + column
            inside = slot < end
            keys = _latent_rows(cache, pages, slot, inside, PAGE_SIZE, DIM)
            latent = _load_part(keys, inside, 0, VALUE_DIM, DOT_DTYPE)
            rope = _load_part(keys, inside, VALUE_DIM, ROPE_DIM, DOT_DTYPE)
            scores = _scores(q_latent, q_rope, latent, rope) * SCALE_LOG2
            acc, top, total = accumulate(acc, top, total, scores, latent)

        # The rest of the prefix and the step's own rows, by packed mask.
        first = tail_begin(prefix, whole_end)
        words = packed_mask + row.to(tl.int64) * mask_words
        for start in tl.range(first, end, 32, num_stages=2):
            slot = start + tl.arange(0, 32)
            inside = (slot >= whole_end) & (slot < end)
            keys = _latent_rows(cache, pages, slot, inside, PAGE_SIZE, DIM)
            latent = _load_part(keys, inside, 0, VALUE_DIM, DOT_DTYPE)
            rope = _load_part(keys, inside, VALUE_DIM, ROPE_DIM, DOT_DTYPE)
            scores = _scores(q_latent, q_rope, latent, rope) * SCALE_LOG2
            visible = tail_visible(words, live, start, prefix, inside)
            scores = tl.where(visible, scores, float("-inf"))
            acc, top, total = accumulate(acc, top, total, scores, latent)

    divisor, lse = finished(top, total)
    partial = (item * blocks + block) * BLOCK_M + lane
    tl.store(partial_lse + partial, lse, mask=live)
    value = tl.arange(0, triton.next_power_of_2(VALUE_DIM))
    tl.store(
        partial_out + partial[:, None] * VALUE_DIM + value[None, :],
        acc / divisor[:, None],
        mask=live[:, None] & (value < VALUE_DIM)[None, :],
    )


@triton.jit
def _latent_rows(cache, pages, slot, inside, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr):
    """Where slots [n] start in the cache; int64, as caches pass 2^31 elements."""
    page = tl.load(pages + slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    return cache + (page * PAGE_SIZE + slot % PAGE_SIZE) * DIM


@triton.jit
def _load_part(rows, inside, FIRST: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """SIZE elements of each row from FIRST on, padded to a power of two: zeros there, and
    outside, where an unwritten page could hold NaN."""
    dim = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = inside[:, None] & (dim < SIZE)[None, :]
    return tl.load(rows[:, None] + FIRST + dim[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _scores(q_latent, q_rope, latent, rope):
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    return tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
