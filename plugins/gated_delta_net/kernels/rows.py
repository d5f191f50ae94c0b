"""What the kernels share: rows of keys, log decays, and who sees whom."""

import triton
import triton.language as tl

from trtree.plugins.branch_device import FRESH

# Of logs: what is masked must be gone before the exponential, which could overflow.
NOTHING = tl.constexpr(-1e30)


@triton.jit
def known(request, inside):
    """``inside`` where the request has a committed state. A whole tensor is compared: of a
    scalar, the interpreter would make integers."""
    fresh = tl.load(request + FRESH) + tl.zeros(inside.shape, tl.int32)
    return inside & (fresh == 0)


@triton.jit
def unit_rows(x, offsets, live, DIM: tl.constexpr, EPS: tl.constexpr):
    """Rows at ``offsets`` [n] of x at unit length, float32 [n, padded DIM]."""
    dim = tl.arange(0, triton.next_power_of_2(DIM))
    mask = live[:, None] & (dim < DIM)[None, :]
    rows = tl.load(x + offsets[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    return rows * tl.rsqrt(tl.sum(rows * rows, 1) + EPS)[:, None]


@triton.jit
def sees(packed_mask, row, live, mask_words, other):
    """[n, m]: whether ``row`` [n] of the step sees row ``other`` [m] of its own request."""
    words = packed_mask + row.to(tl.int64)[:, None] * mask_words + other[None, :] // 32
    inside = live[:, None] & (other // 32 < mask_words)[None, :]
    word = tl.load(words, mask=inside, other=0)
    return ((word >> (other % 32)[None, :]) & 1) == 1
