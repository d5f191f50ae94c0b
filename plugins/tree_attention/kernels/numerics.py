"""Rounding that the kernels share, in integers.

Triton's interpreter truncates float32 -> bfloat16 stores and mis-rounds float8 ones.
Rounding in integers costs a few instructions on a handful of values per step and makes
the interpreter and the GPU run the same arithmetic, so that what is tested is what runs.
"""

import triton
import triton.language as tl


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """float32 -> DTYPE (bfloat16, float16 or float8e4nv), to nearest even; e4m3 saturates."""
    if DTYPE == tl.bfloat16:
        return _bfloat16(x)
    elif DTYPE == tl.float8e4nv:
        return _e4m3(x)
    else:
        return x.to(DTYPE)


@triton.jit
def _bfloat16(x):
    bits = x.to(tl.uint32, bitcast=True)
    # Half an ulp less one, plus the last kept bit: ties go to the even neighbour.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x == x, rounded, 0x7FC0)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _e4m3(x):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Normal numbers: keep 3 mantissa bits, then move the exponent's bias from 127 to 7.
    wide = magnitude.to(tl.uint32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormals are multiples of 2^-9, which is the ulp of 2^14: the sum rounds.
    subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    code = code | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
