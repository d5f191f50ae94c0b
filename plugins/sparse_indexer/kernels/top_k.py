"""The top_k largest scores of a row, as rising slots: a radix select, one program per row.

Four passes over the scores find the top_k-th largest one, a byte at a time from the top: a
histogram of the byte among the scores that agree in the bytes above. A fifth takes what is
larger, and of equal scores the lowest slots, and writes them in the order in which they stand,
which needs a running count and no sort. The result is the stable choice whatever the block size.
"""

import triton
import triton.language as tl


@triton.jit
def index_top_k_kernel(
    scores,  # float32 [rows, width]; -inf: not seen
    lengths,  # int32 [rows]: slots of the row's request, 0: padding row
    width,
    top_k,
    selection,  # int32 [rows, top_k]: rising slots, then -1
    nan_counts,  # int32 [rows]: NaN among the row's scores, which are never chosen
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    of_row = scores + row * width
    lane = tl.arange(0, BLOCK)

    digit = tl.arange(0, 256)
    known = tl.full([], 0, tl.uint32)  # the top_k-th largest key, as far as it is known
    need = top_k  # how many of the keys that agree with it are to be taken
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, length, BLOCK):
            key, seen, _ = _load_keys(of_row, start + lane, length)
            if shift < 24:
                seen &= (key >> (shift + 8)) == known
            byte = ((key >> shift) & 0xFF).to(tl.int32)
            counts += tl.histogram(byte, 256, mask=seen)
        larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        # Fewer keys than needed: the search ends at 0, and all of them are larger.
        found = tl.sum((larger >= need).to(tl.int32), 0)
        need -= tl.sum(tl.where(digit == found, larger, 0), 0)
        known = (known << 8) | found.to(tl.uint32)

    taken = 0
    equals = 0
    nans = 0
    target = selection + row * top_k
    for start in range(0, length, BLOCK):
        slot = start + lane
        key, seen, nan = _load_keys(of_row, slot, length)
        equal = (seen & (key == known)).to(tl.int32)
        before = equals + tl.cumsum(equal, 0) - equal
        chosen = (seen & (key > known)) | ((equal == 1) & (before < need))
        count = chosen.to(tl.int32)
        place = taken + tl.cumsum(count, 0) - count
        # There are never more; whatever the scores are, nothing is written past the row's end.
        tl.store(target + place, slot, mask=chosen & (place < top_k))
        equals += tl.sum(equal, 0)
        taken += tl.sum(count, 0)
        nans += tl.sum(nan.to(tl.int32), 0)
    for start in range(0, top_k, BLOCK):
        place = start + lane
        tl.store(target + place, -1 + 0 * place, mask=(place >= taken) & (place < top_k))
    tl.store(nan_counts + row, nans)


@triton.jit
def _load_keys(of_row, slot, length):
    """Scores as uint32 in the order of the numbers; which are seen; which are NaN."""
    inside = slot < length
    score = tl.load(of_row + slot, mask=inside, other=float("-inf"))
    # Equal zeros must tie: -0.0 has other bits. Negative floats order backwards as integers.
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    key = bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return key, score > float("-inf"), score != score
