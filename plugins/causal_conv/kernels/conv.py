"""The convolution, and the commit of its window.

A row's inputs are gathered by a table made once per step (contract.py): entries below
KERNEL - 1 are of the committed window, the others are rows of the same request.
"""

import triton
import triton.language as tl

from trtree.plugins.branch_device import FIELDS, FIRST_ROW, FRESH, SLOT
from trtree.plugins.tree_attention.kernels.numerics import round_to


@triton.jit
def causal_conv_kernel(
    x,  # [rows, channels]
    weight,  # float32 [channels, KERNEL], the newest input's last
    window,  # [slots, KERNEL - 1, channels], oldest first; read only
    inputs,  # int32 [rows, KERNEL]
    owners,  # int32 [rows]: the row's request; -1: padding row, not written
    requests,  # int32 [requests, FIELDS]
    rows,
    channels,
    x_stride,  # elements from row to row
    out,  # [rows, channels]
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per (block of rows, block of channels)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < channels
    owner = tl.load(owners + row, mask=row < rows, other=-1)
    live = owner >= 0
    request = requests + owner * FIELDS
    first = tl.load(request + FIRST_ROW, mask=live, other=0)
    slot = tl.load(request + SLOT, mask=live, other=0).to(tl.int64)
    fresh = tl.load(request + FRESH, mask=live, other=1)
    total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
    for tap in tl.static_range(KERNEL):
        entry = tl.load(inputs + row.to(tl.int64) * KERNEL + tap, mask=live, other=0)
        of_step = entry >= KERNEL - 1
        source = (first + entry - (KERNEL - 1)).to(tl.int64)
        from_rows = tl.load(
            x + source[:, None] * x_stride + channel[None, :],
            mask=(live & of_step)[:, None] & known[None, :],
            other=0.0,
        )
        from_window = tl.load(
            window + (slot * (KERNEL - 1) + entry)[:, None] * channels + channel[None, :],
            mask=(live & (fresh == 0) & (entry < KERNEL - 1))[:, None] & known[None, :],
            other=0.0,
        )
        seen = tl.where(of_step[:, None], from_rows, from_window).to(tl.float32)
        tap_weight = tl.load(weight + channel * KERNEL + tap, mask=known, other=0.0)
        total += seen * tap_weight[None, :]
    result = total * tl.sigmoid(total)
    tl.store(
        out + row.to(tl.int64)[:, None] * channels + channel[None, :],
        round_to(result, out.dtype.element_ty),
        mask=live[:, None] & known[None, :],
    )


@triton.jit
def causal_conv_commit_kernel(
    x,  # [rows, channels]
    requests,  # int32 [requests, FIELDS]
    accepted,  # int32 [requests, max_accepted]: rows of the request, a path
    num_accepted,  # int32 [requests]
    channels,
    x_stride,
    max_accepted,
    window,  # [slots, KERNEL - 1, channels]
    KERNEL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per (request, block of channels). Window entry t becomes what stood count
    places behind it, in the window or on the path: a thread reads ahead of what it writes,
    always in the channels that are its own."""
    request = requests + tl.program_id(0) * FIELDS
    count = tl.load(num_accepted + tl.program_id(0))
    if count == 0:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = channel < channels
    first = tl.load(request + FIRST_ROW)
    # Whole tensors are compared: of scalars, the interpreter would make integers.
    each = tl.zeros([BLOCK_C], tl.int32)
    fresh = tl.load(request + FRESH) + each
    path = accepted + tl.program_id(0) * max_accepted
    own = window + tl.load(request + SLOT).to(tl.int64) * (KERNEL - 1) * channels + channel
    for entry in tl.static_range(KERNEL - 1):
        source = entry + count + each
        of_step = known & (source >= KERNEL - 1)
        row = first + tl.load(path + source - (KERNEL - 1), mask=of_step, other=0)
        from_rows = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=of_step, other=0)
        in_window = known & (source < KERNEL - 1) & (fresh == 0)
        from_window = tl.load(own + source * channels, mask=in_window, other=0)
        moved = tl.where(of_step, from_rows, from_window)
        tl.store(own + entry * channels, moved, mask=known)
