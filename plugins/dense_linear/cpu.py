"""The CPU kernels of dense linears, from Python: packing, and calls for tests and tools.

The engine calls the same functions from C++ (`dense_linear.hpp`); README.md defines
the arithmetic and the packed layout.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

import trtree._core as _core

FloatArray = npt.NDArray[np.float32]

ALIGNMENT = 64  # of packed weights, in bytes
_SERIAL = _core.Serial()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Rows(Protocol):
    """A weight [O, K] to be packed some rows at a time."""

    shape: tuple[int, int]

    def packed_size(self, first: int, end: int) -> int:
        """Bytes of these rows."""
        ...

    def pack(self, first: int, end: int, packed: npt.NDArray[np.uint8]) -> None:
        """Rows ``first`` to ``end`` into uint8 [packed_size]; both are multiples of 16, but for
        the weight's end. Raises ValueError if a number is not one to be packed."""
        ...


class DenseRows:
    """A weight in parts that follow one another along O.

    Args:
        parts: [O, K] each, bf16, fp16 or float32, of one K and dtype; each row contiguous.
    """

    def __init__(self, parts: Sequence[torch.Tensor], *, isa: str = "") -> None:
        self.shape = (sum(len(part) for part in parts), parts[0].shape[1])
        self.dtype = _name(parts[0].dtype)
        self.parts = [part.view(torch.uint8).numpy() for part in parts]
        self._isa = isa

    def packed_size(self, first: int, end: int) -> int:
        """Bytes of these rows."""
        return int(_core.dense_linear.packed_size(end - first, self.shape[1], self.dtype))

    def pack(self, first: int, end: int, packed: npt.NDArray[np.uint8]) -> None:
        """As ``Rows.pack``; ValueError for NaN, infinity and dtypes not named above."""
        if not self.pack_any(first, end, packed):
            rows, k = self.shape
            raise ValueError(
                f"dense weight [{rows}, {k}]: rows {first} to {end} have numbers that are NaN or "
                "infinite"
            )

    def pack_any(self, first: int, end: int, packed: npt.NDArray[np.uint8]) -> bool:
        """The same of any numbers; returns whether all are finite."""
        finite: bool = _core.dense_linear.pack(
            self.parts, self.dtype, self.shape[1], first, end, packed, self._isa
        )
        return finite

    def largest_magnitude(self) -> float:
        """Infinity or NaN if there is one."""
        return float(_core.dense_linear.largest_magnitude(self.parts, self.dtype, self.shape[1]))


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Memory at a multiple of 64, as kernels want packed weights; its bytes are not set."""
    room = np.empty(size + ALIGNMENT - 1, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]


def pack(weight: torch.Tensor, *, isa: str = "") -> npt.NDArray[np.uint8]:
    """A weight [O, K], bf16, fp16 or float32, of any numbers -> uint8 [bytes], to be stored
    and memory-mapped at multiples of 64. ValueError for any other dtype."""
    rows = DenseRows([weight.contiguous()], isa=isa)
    packed = aligned(rows.packed_size(0, len(weight)))
    rows.pack_any(0, len(weight), packed)
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
