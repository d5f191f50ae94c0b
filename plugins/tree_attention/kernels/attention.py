"""Split-KV tree attention: one program per (work item, KV head).

A work item (plan.py) is a tile of one request's rows and a range of its keys. The query
heads of a group are rows of the same tile (GROUP * rows, head fastest), so that 17 tree
rows fill a tensor-core tile and every key is read once per tile. Keys of the committed
prefix need no mask; only the tree's own rows, at the end, consult the packed one. Each
program leaves a normalised partial result and its log-sum-exp; combine.py merges them.

The argument order (inputs, integers, outputs) is the one TensorRT gives a plugin's kernel.
"""

import triton
import triton.language as tl

from trtree.plugins.tree_attention.kernels.softmax import (
    accumulate,
    finished,
    nothing_yet,
    tail_begin,
    tail_visible,
    whole_blocks,
)

# The fields of a work item, int32 each.
REQUEST = tl.constexpr(0)
TILE_ROW = tl.constexpr(1)  # first row of the tile, of all rows of the step
TILE_ROWS = tl.constexpr(2)  # 0: padding, nothing to do
SEGMENT_ROW = tl.constexpr(3)  # first row of the request
PREFIX = tl.constexpr(4)
KEY_BEGIN = tl.constexpr(5)  # the range of KV slots; past PREFIX they are the step's own rows
KEY_END = tl.constexpr(6)
WORK_FIELDS = tl.constexpr(7)


@triton.jit
def tree_attention_kernel(
    q,  # [rows, kv_heads * GROUP, HEAD_DIM]
    k_cache,  # [pages, PAGE_SIZE, kv_heads, HEAD_DIM]
    v_cache,
    page_table,  # int32 [requests, table_width]
    packed_mask,  # int32 [rows, mask_words]
    positions,  # int32 [rows]
    work,  # int32 [items, WORK_FIELDS]
    k_scale,  # float32 [kv_heads], read if the cache is FP8
    v_scale,  # float32 [kv_heads], likewise
    table_width,
    mask_words,
    partial_out,  # float32 [items, kv_heads, BLOCK_M, HEAD_DIM]
    partial_lse,  # float32 [items, kv_heads, BLOCK_M], base 2
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCALE_LOG2: tl.constexpr,  # softmax scale * log2(e): the softmax runs in base 2
    WINDOW: tl.constexpr,  # 0: none
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    field = work + item * WORK_FIELDS
    tile_rows = tl.load(field + TILE_ROWS)
    if tile_rows == 0:
        return
    tile_row = tl.load(field + TILE_ROW)
    segment_row = tl.load(field + SEGMENT_ROW)
    prefix = tl.load(field + PREFIX)
    begin = tl.load(field + KEY_BEGIN)
    end = tl.load(field + KEY_END)
    pages = page_table + tl.load(field + REQUEST).to(tl.int64) * table_width

    DIM_PAD: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dim = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, BLOCK_M)
    row = tile_row + lane // GROUP
    live = lane // GROUP < tile_rows
    head = kv_head * GROUP + lane % GROUP
    queries = (row.to(tl.int64) * kv_heads * GROUP + head) * HEAD_DIM
    q_tile = tl.load(
        q + queries[:, None] + dim[None, :],
        mask=live[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)

    FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    scale = SCALE_LOG2
    if FP8:
        scale *= tl.load(k_scale + kv_head)
    if WINDOW > 0:
        oldest = tl.load(positions + row, mask=live, other=0) - WINDOW
    else:
        oldest = tl.full([BLOCK_M], -1, tl.int32)

    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    top, total = nothing_yet(BLOCK_M)
    head_offset = kv_head * HEAD_DIM
    row_stride = kv_heads * HEAD_DIM

    # The committed prefix, whole blocks: no mask. A prefix slot's position is its number.
    whole_end = whole_blocks(begin, end, prefix, BLOCK_N)
    column = tl.arange(0, BLOCK_N)
    for start in range(begin, whole_end, BLOCK_N):
        slot = start + column
        inside = slot < end
        offset = _kv_offsets(pages, slot, inside, head_offset, row_stride, PAGE_SIZE, True)
        keys = _load_kv(k_cache, offset, inside, HEAD_DIM, DOT_DTYPE, True)
        scores = tl.dot(q_tile, tl.trans(keys), input_precision="ieee") * scale
        if WINDOW > 0:
            # Compared as columns, which are known at compile time, to spare registers.
            scores = tl.where(column[None, :] > (oldest - start)[:, None], scores, float("-inf"))
        values = _load_kv(v_cache, offset, inside, HEAD_DIM, DOT_DTYPE, True)
        acc, top, total = accumulate(acc, top, total, scores, values)

    # The rest of the prefix and the step's own rows, by packed mask.
    first = tail_begin(prefix, whole_end)
    words = packed_mask + row.to(tl.int64) * mask_words
    for start in tl.range(first, end, 32, num_stages=TAIL_STAGES):
        slot = start + tl.arange(0, 32)
        tree_row = slot - prefix
        inside = (slot >= whole_end) & (slot < end)
        offset = _kv_offsets(pages, slot, inside, head_offset, row_stride, PAGE_SIZE, False)
        keys = _load_kv(k_cache, offset, inside, HEAD_DIM, DOT_DTYPE, False)
        scores = tl.dot(q_tile, tl.trans(keys), input_precision="ieee") * scale
        in_tree = tree_row >= 0  # alike for the whole block
        visible = tail_visible(words, live, start, prefix, inside)
        if WINDOW > 0:
            own = positions + segment_row + tree_row
            position = tl.load(own, mask=inside & in_tree, other=0)
            position = tl.where(in_tree, position, slot)
            visible &= position[None, :] > oldest[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        values = _load_kv(v_cache, offset, inside, HEAD_DIM, DOT_DTYPE, False)
        acc, top, total = accumulate(acc, top, total, scores, values)

    divisor, lse = finished(top, total)
    out = acc / divisor[:, None]
    if FP8:
        out *= tl.load(v_scale + kv_head)
    partial = (item * kv_heads + kv_head) * BLOCK_M + lane
    tl.store(partial_lse + partial, lse, mask=live)
    tl.store(
        partial_out + partial[:, None] * HEAD_DIM + dim[None, :],
        out,
        mask=live[:, None] & (dim < HEAD_DIM)[None, :],
    )


@triton.jit
def _kv_offsets(
    pages, slot, inside, head_offset, row_stride, PAGE_SIZE: tl.constexpr, WHOLE: tl.constexpr
):
    """Where slots [n] start in the cache: elements, int64, as caches pass 2^31 of them."""
    if WHOLE:
        page = tl.load(pages + slot // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(pages + slot // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    return (page * PAGE_SIZE + slot % PAGE_SIZE) * row_stride + head_offset


@triton.jit
def _load_kv(
    cache, offset, inside, HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr, WHOLE: tl.constexpr
):
    """[n, padded head_dim]; zeros outside, where an unwritten page could hold NaN."""
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    pointers = cache + offset[:, None] + dim[None, :]
    if WHOLE and triton.next_power_of_2(HEAD_DIM) == HEAD_DIM:
        return tl.load(pointers).to(DTYPE)
    else:
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        return tl.load(pointers, mask=mask, other=0.0).to(DTYPE)
