"""Commit: move the KV of the accepted rows right behind the prefix, all layers at once.

One program per (cache, request, column range of a KV row). Source and destination slots
overlap across rows, never across columns, so programs are independent. Within a program a
batch of rows is read whole before any of it is written. Accepted rows increase strictly
(row[i] >= i), so a later batch reads only slots behind everything written so far, and the
batches may follow one another.
"""

import triton
import triton.language as tl


@triton.jit
def tree_kv_commit_kernel(
    caches,  # int64 [caches]: device addresses of every layer's k and v cache
    page_table,  # int32 [requests, table_width]
    prefix_lengths,  # int32 [requests]
    accepted,  # int32 [requests, max_accepted], strictly increasing rows of the request
    num_accepted,  # int32 [requests]
    table_width,
    max_accepted,
    PAGE_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,  # 32-bit words of one slot: kv_heads * head_dim * itemsize / 4
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # Rows are moved as words: no kernel per cache type, and no rounding to get wrong.
    cache = tl.load(caches + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    cache = tl.multiple_of(cache, 16)
    request = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    count = tl.load(num_accepted + request)
    prefix = tl.load(prefix_lengths + request)
    pages = page_table + request * table_width

    for start in range(0, count, BLOCK_R):
        target = start + tl.arange(0, BLOCK_R)
        source = tl.load(accepted + request * max_accepted + target, mask=target < count, other=0)
        # The head of the path usually stands where it belongs already.
        moves = (target < count) & (source != target)
        mask = moves[:, None] & (word < ROW_WORDS)[None, :]
        from_row = _slot_row(pages, prefix + source, moves, PAGE_SIZE)
        to_row = _slot_row(pages, prefix + target, moves, PAGE_SIZE)
        kept = tl.load(cache + from_row[:, None] * ROW_WORDS + word[None, :], mask=mask)
        # Another thread's source may be this thread's target.
        tl.debug_barrier()
        tl.store(cache + to_row[:, None] * ROW_WORDS + word[None, :], kept, mask=mask)


@triton.jit
def _slot_row(pages, slot, live, PAGE_SIZE: tl.constexpr):
    page = tl.load(pages + slot // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    return page * PAGE_SIZE + slot % PAGE_SIZE
