"""DDTree's best-first search on the GPU: one program per request, frontier in registers.

Ringel & Romano, arXiv 2604.12989, to the bit of the published code given the same top-k
log-probs. A heap in scratch memory would be a race here: Triton puts no barrier between one
thread's store and another's load. Instead the frontier is a vector of candidates, popped by
a maximum over all of them; at a few dozen to some thousand entries that is a handful of
instructions per thread.

Ties go to the lexicographically smaller rank path. Paths are not stored: each candidate has
its place in the lexicographic order of all that are there. Popping a node at place p makes
its first child (the same path and a 0) the next in that order and its next sibling the one
after, as nothing else begins with the popped path yet; all later places move on by two.
"""

import triton
import triton.language as tl

# A candidate's parent row, level (depth - 1) and rank in one integer.
_LEVEL_SHIFT = tl.constexpr(20)
_PARENT_SHIFT = tl.constexpr(40)
_FIELD = tl.constexpr(0xFFFFF)


@triton.jit
def build_tree_kernel(
    log_probs,  # float32 [requests, depth, top_k], decreasing in rank
    token_ids,  # int32 [requests, depth, top_k]
    bonus_tokens,  # int32 [requests]
    prefix_lengths,  # int32 [requests]
    budgets,  # int32 [requests]: nodes besides the root, at most width - 1
    depth,
    top_k,
    width,  # rows kept for a tree: the verify width
    mask_words,
    num_rows,  # int32 [requests]: root and nodes
    row_tokens,  # int32 [requests, width]
    positions,  # int32 [requests, width]: prefix length + depth
    parents,  # int32 [requests, width]: rows, -1 the committed prefix
    packed_mask,  # int32 [requests, width, mask_words]
    FRONTIER: tl.constexpr,  # a power of two, at least width
    BLOCK_R: tl.constexpr,  # rows of the mask written at a time
    WORDS: tl.constexpr,  # a power of two, at least mask_words
):
    request = tl.program_id(0).to(tl.int64)
    budget = tl.load(budgets + request)
    prefix = tl.load(prefix_lengths + request)
    scores = log_probs + request * depth * top_k
    tokens = token_ids + request * depth * top_k
    row_tokens += request * width
    positions += request * width
    parents += request * width

    # Rows past the tree are roots that nobody sees; the search overwrites the others.
    lane = tl.arange(0, FRONTIER)
    tl.store(row_tokens + lane, tl.load(bonus_tokens + request), mask=lane < width)
    tl.store(positions + lane, prefix, mask=lane < width)
    tl.store(parents + lane, -1, mask=lane < width)
    # The same rows are written again below, by other threads.
    tl.debug_barrier()

    root_child = tl.load(scores, mask=depth > 0, other=float("-inf")).to(tl.float64)
    total = tl.where(lane == 0, root_child, float("-inf"))
    place = tl.zeros([FRONTIER], tl.int32)
    fields = tl.zeros([FRONTIER], tl.int64)
    row = tl.full([], 1, tl.int32)
    best = tl.max(total, 0)
    while (row <= budget) & (best > float("-inf")):
        tied = total == best
        first = tl.min(tl.where(tied, place, 0x7FFFFFFF), 0)
        popped = tied & (place == first)
        field = tl.sum(tl.where(popped, fields, 0), 0)
        rank = field & _FIELD
        level = (field >> _LEVEL_SHIFT) & _FIELD
        parent = field >> _PARENT_SHIFT
        at = level * top_k + rank
        tl.store(row_tokens + row, tl.load(tokens + at))
        tl.store(positions + row, (prefix + level + 1).to(tl.int32))
        tl.store(parents + row, parent.to(tl.int32))

        # This order of operations, in float64, is part of the contract. Log-probs of -inf
        # are forbidden tokens; their candidates are never popped.
        own = tl.load(scores + at).to(tl.float64)
        beside = tl.load(scores + at + 1, mask=rank + 1 < top_k, other=float("-inf"))
        below = tl.load(scores + (level + 1) * top_k, mask=level + 1 < depth, other=float("-inf"))
        sibling = best - own + beside.to(tl.float64)
        child = best + below.to(tl.float64)

        # The sibling takes the popped candidate's lane, the child a new one: lane ``row``.
        is_child = lane == row
        place = tl.where(place > first, place + 2, place)
        place = tl.where(popped, first + 2, tl.where(is_child, first + 1, place))
        total = tl.where(popped, sibling, tl.where(is_child, child, total))
        child_field = (row.to(tl.int64) << _PARENT_SHIFT) | ((level + 1) << _LEVEL_SHIFT)
        fields = tl.where(popped, field + 1, tl.where(is_child, child_field, fields))
        row += 1
        best = tl.max(total, 0)
    tl.store(num_rows + request, row)

    # The walk below reads parents that other threads wrote.
    tl.debug_barrier()
    word = tl.arange(0, WORDS)
    for start in range(0, width, BLOCK_R):
        own_row = start + tl.arange(0, BLOCK_R)
        ancestor = own_row
        mask = tl.zeros([BLOCK_R, WORDS], tl.uint32)
        for _ in range(depth + 1):
            bit = tl.full([BLOCK_R], 1, tl.uint32) << (ancestor & 31).to(tl.uint32)
            here = word[None, :] == (ancestor >> 5)[:, None]
            mask |= tl.where(here & (ancestor >= 0)[:, None], bit[:, None], 0)
            known = (ancestor >= 0) & (ancestor < width)
            ancestor = tl.load(parents + ancestor, mask=known, other=-1)
        row_words = packed_mask + (request * width + own_row[:, None]) * mask_words
        inside = (own_row < width)[:, None] & (word < mask_words)[None, :]
        tl.store(row_words + word[None, :], mask.to(tl.int32, bitcast=True), mask=inside)
