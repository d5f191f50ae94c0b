"""Log decays summed along every row's path: G = sees @ g.

One program per (request, block of rows); all value heads are columns of its product.
"""

import triton
import triton.language as tl

from trtree.plugins.branch_device import FIELDS, FIRST_ROW, NUM_ROWS
from trtree.plugins.gated_delta_net.kernels.rows import sees


@triton.jit
def gated_delta_decay_kernel(
    a,  # [rows, heads]
    gates,  # float32 [2, heads]: A_log, dt_bias
    packed_mask,  # int32 [rows, mask_words]
    requests,  # int32 [requests, FIELDS]
    a_stride,  # elements from row to row
    mask_words,
    decay,  # float32 [rows, heads]
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,  # a power of two, at least 16
    BLOCK: tl.constexpr,
):
    request = requests + tl.program_id(0) * FIELDS
    start = tl.program_id(1) * BLOCK
    num_rows = tl.load(request + NUM_ROWS)
    if start >= num_rows:
        return
    first = tl.load(request + FIRST_ROW)
    lane = tl.arange(0, BLOCK)
    head = tl.arange(0, HEADS_PAD)
    known = head < HEADS
    rate = -tl.exp(tl.load(gates + head, mask=known, other=0.0))
    bias = tl.load(gates + HEADS + head, mask=known, other=0.0)
    live = start + lane < num_rows
    row = first + start + lane
    total = tl.zeros([BLOCK, HEADS_PAD], tl.float32)
    # A row comes after its ancestors.
    for before in range(0, start + BLOCK, BLOCK):
        other = before + lane
        there = (other < num_rows)[:, None] & known[None, :]
        offset = (first + other).to(tl.int64)[:, None] * a_stride + head[None, :]
        x = tl.load(a + offset, mask=there, other=0.0).to(tl.float32) + bias[None, :]
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        g = tl.where(there, rate[None, :] * softplus, 0.0)
        seen = sees(packed_mask, row, live, mask_words, other).to(tl.float32)
        total = tl.dot(seen, g, total, input_precision="tf32x3")
    tl.store(
        decay + row.to(tl.int64)[:, None] * HEADS + head[None, :],
        total,
        mask=live[:, None] & known[None, :],
    )
