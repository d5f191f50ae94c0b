"""The walk on the GPU: from the target's choices to accepted rows and the next bonus token.

One program per request, its tree in registers. Row by row, as the C++ does it, would be a
dependent load for every row of the tree; here each accepted row is one search over all rows
for the child that carries the target's choice. What comes out is what the commit kernel takes.
"""

import triton
import triton.language as tl

_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def walk_tree_kernel(
    num_rows,  # int32 [requests]: root and nodes
    row_tokens,  # int32 [requests, width]
    parents,  # int32 [requests, width]: rows, -1 the committed prefix
    choices,  # int32 [requests, width]: the target's own token at every row
    width,
    max_accepted,
    accepted,  # int32 [requests, max_accepted], increasing, the root first
    num_accepted,  # int32 [requests]
    bonus_tokens,  # int32 [requests]
    ROWS: tl.constexpr,  # a power of two, at least width
):
    request = tl.program_id(0).to(tl.int64)
    rows = tl.load(num_rows + request)
    choices += request * width
    accepted += request * max_accepted
    lane = tl.arange(0, ROWS)
    live = lane < rows
    token = tl.load(row_tokens + request * width + lane, mask=live, other=-1)
    parent = tl.load(parents + request * width + lane, mask=live, other=-1)

    row = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    choice = tl.load(choices)
    while row != _NONE:
        tl.store(accepted + count, row)
        count += 1
        choice = tl.load(choices + row)
        # Children come after their parent; of siblings with one token the lower row counts.
        follows = live & (parent == row) & (token == choice) & (lane > row)
        row = tl.min(tl.where(follows, lane, _NONE), 0)
    tl.store(num_accepted + request, count)
    tl.store(bonus_tokens + request, choice)
