"""The CPU kernels of dense linears, from Python: packing, and calls for tests and tools.

The engine calls the same functions from C++ (`dense_linear.hpp`); README.md defines
the arithmetic and the packed layout.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

import trtree._core as _core

FloatArray = npt.NDArray[np.float32]

_SERIAL = _core.Serial()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pack(weight: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A weight [O, K], bf16, fp16 or float32 -> uint8 [bytes], to be stored and
    memory-mapped at multiples of 64. ValueError for any other dtype."""
    data = weight.contiguous().view(torch.uint8).numpy()
    packed: npt.NDArray[np.uint8] = _core.dense_linear.pack(data, _name(weight.dtype))
    return packed


def packed_size(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Bytes of a packed weight [O, K]."""
    return int(_core.dense_linear.packed_size(out_features, in_features, _name(dtype)))


def linear(
    packed: npt.NDArray[np.uint8],
    dtype: torch.dtype,
    x: FloatArray,
    *,
    out_features: int,
    bias: FloatArray | None = None,
    segment_bounds: Sequence[int] | None = None,
    partial_sums: bool = False,
    parallel: _core.Parallel = _SERIAL,
    isa: str = "",
) -> FloatArray:
    """x float32 [R, K] -> float32 [R, O]; arguments as for `nvfp4_linear.linear`, with
    blocks of 16 along K of which the last may be partial.

    Raises:
        ValueError: shapes, packed bytes, dtype, bounds or isa do not fit.
    """
    result: FloatArray = _core.dense_linear.linear(
        packed,
        _name(dtype),
        x,
        out_features,
        bias,
        None if segment_bounds is None else list(segment_bounds),
        partial_sums,
        parallel,
        isa,
    )
    return result


def unpack_row(
    packed: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, int], row: int
) -> FloatArray:
    """Row `row` of the weight `shape` = [O, K] as float32 [K]: an embedding that shares
    the packed lm_head. ValueError if there is no such row."""
    result: FloatArray = _core.dense_linear.unpack_row(packed, _name(dtype), *shape, row)
    return result
