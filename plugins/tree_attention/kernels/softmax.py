"""What attention over paged keys and over latents share: the masked tail of an item's keys, and
the softmax over one block of them after another."""

import triton
import triton.language as tl


@triton.jit
def whole_blocks(begin, end, prefix, BLOCK_N: tl.constexpr):
    """Where the whole blocks of a range's committed keys end, which need no mask."""
    return begin + tl.maximum(tl.minimum(end, prefix) - begin, 0) // BLOCK_N * BLOCK_N


@triton.jit
def tail_begin(prefix, whole_end):
    """Where the rest begins: blocks of 32 keys that start a multiple of 32 away from the first
    tree row, so that each takes one mask word per row."""
    before = tl.maximum(prefix - whole_end, 0)
    behind = tl.maximum(whole_end - prefix, 0)  # > 0: the range begins among the step's rows
    return prefix - tl.cdiv(before, 32) * 32 + behind // 32 * 32


@triton.jit
def tail_visible(words, live, start, prefix, inside):
    """[rows, 32]: who sees which key of the block at slot ``start``. words: pointers to the rows'
    masks [rows]; a block before the tree takes all ones."""
    bit = tl.arange(0, 32)
    first_bit = start - prefix + tl.zeros(live.shape, tl.int32)
    word = tl.load(words + first_bit // 32, mask=live & (first_bit >= 0), other=-1)
    return inside[None, :] & (((word[:, None] >> bit[None, :]) & 1) == 1)


@triton.jit
def nothing_yet(BLOCK_M: tl.constexpr):
    """Largest score and sum of weights before any key [BLOCK_M]."""
    # Finite, so that a row that has seen nothing yet never subtracts -inf from -inf.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def accumulate(acc, top, total, scores, values):
    """One step of the online softmax (Milakov & Gimelshein, arXiv 1805.02867), in base 2."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    keep = tl.exp2(top - new_top)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def finished(top, total):
    """What to divide the weighted sums by, and the log-sum-exp, base 2; a row that saw none of the
    keys leaves zeros with weight exp2(-inf)."""
    seen = total > 0
    divisor = tl.where(seen, total, 1.0)
    return divisor, tl.where(seen, top + tl.log2(divisor), float("-inf"))
