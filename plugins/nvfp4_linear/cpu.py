"""The CPU kernels of NVFP4 linears, from Python: packing, and calls for tests and tools.

The engine calls the same functions from C++ (`nvfp4_linear.hpp`); README.md defines
the arithmetic and the packed layout.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

import trtree._core as _core
from trtree.plugins.dense_linear.cpu import DenseRows, aligned
from trtree.plugins.nvfp4_linear import format as nvfp4

FloatArray = npt.NDArray[np.float32]

_SERIAL = _core.Serial()


class CodedRows:
    """A weight in parts that follow one another along O, to be packed some rows at a time.

    Args:
        codes, block_scales: of ``format.QuantizedTensor``s of one K and global scale, which the
            plan has to know; each row contiguous.
    """

    def __init__(
        self,
        codes: Sequence[torch.Tensor],
        block_scales: Sequence[torch.Tensor],
        *,
        isa: str = "",
    ) -> None:
        self.shape = (sum(map(len, codes)), 2 * codes[0].shape[1])
        self._codes = [part.numpy() for part in codes]
        self._scales = [part.view(torch.uint8).numpy() for part in block_scales]
        self._isa = isa

    def packed_size(self, first: int, end: int) -> int:
        """Bytes of these rows."""
        return packed_size(end - first, self.shape[1])

    def pack(self, first: int, end: int, packed: npt.NDArray[np.uint8]) -> None:
        """Rows ``first`` to ``end`` into uint8 [packed_size]; both are multiples of 16, but for
        the weight's end.

        Raises:
            ValueError: K is not a multiple of 16, or a block scale is negative or NaN.
        """
        k = self.shape[1]
        _core.nvfp4_linear.pack(self._codes, self._scales, k, first, end, packed, self._isa)


class RoundedRows:
    """A dense weight, likewise, rounded to NVFP4 as ``format.quantize_weight`` does.

    Args:
        parts: [O, K] each, bf16, fp16 or float32, of one K and dtype, and finite.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], global_scale: float, *, isa: str = ""
    ) -> None:
        self._rows = DenseRows(parts)
        self.shape = self._rows.shape
        self._global_scale = global_scale
        self._isa = isa

    def packed_size(self, first: int, end: int) -> int:
        """Bytes of these rows."""
        return packed_size(end - first, self.shape[1])

    def pack(self, first: int, end: int, packed: npt.NDArray[np.uint8]) -> None:
        """As ``CodedRows.pack``."""
        _core.nvfp4_linear.quantize(
            self._rows.parts,
            self._rows.dtype,
            self.shape[1],
            self._global_scale,
            first,
            end,
            packed,
            self._isa,
        )


def pack(weight: nvfp4.QuantizedTensor, *, isa: str = "") -> npt.NDArray[np.uint8]:
    """A weight [O, K] -> uint8 [bytes], to be stored and memory-mapped at multiples of 64.

    Raises:
        ValueError: K is not a multiple of 16, or a block scale is negative or NaN.
    """
    rows = CodedRows([weight.codes.contiguous()], [weight.block_scale.contiguous()], isa=isa)
    packed = aligned(rows.packed_size(0, rows.shape[0]))
    rows.pack(0, rows.shape[0], packed)
    return packed


def packed_size(out_features: int, in_features: int) -> int:
    """Bytes of a packed weight [O, K]; ValueError if K is not a multiple of 16."""
    return int(_core.nvfp4_linear.packed_size(out_features, in_features))


def linear(
    packed: npt.NDArray[np.uint8],
    x: FloatArray,
    *,
    out_features: int,
    global_scale: float,
    input_scale: float | None,
    bias: FloatArray | None = None,
    segment_bounds: Sequence[int] | None = None,
    partial_sums: bool = False,
    parallel: _core.Parallel = _SERIAL,
    isa: str = "",
) -> FloatArray:
    """x float32 [R, K] -> float32 [R, O].

    Args:
        packed: uint8, from `pack`.
        input_scale: quantize x to NVFP4 with it (W4A4); None rounds x to bf16 (W4A16).
        bias: float32 [O].
        segment_bounds: in blocks of 16, from 0 to K / 16 in 1 to 8 steps; by default 8
            segments cut at floor(i * blocks / 8).
        partial_sums: return [R, segments, O], the segments' sums, to be added in order
            and then multiplied by `output_scale`.
        parallel: `_core.ThreadPool(n)`, or the calling thread alone.
        isa: "portable", "avx2" or "avx512"; by default the best that the CPU has.

    Raises:
        ValueError: shapes, packed bytes, bounds, input_scale or isa do not fit.
    """
    result: FloatArray = _core.nvfp4_linear.linear(
        packed,
        x,
        out_features,
        global_scale,
        input_scale,
        bias,
        None if segment_bounds is None else list(segment_bounds),
        partial_sums,
        parallel,
        isa,
    )
    return result


def output_scale(global_scale: float, input_scale: float | None) -> float:
    """What the sum of a linear's segments is multiplied by before the bias is added."""
    return float(_core.nvfp4_linear.output_scale(global_scale, input_scale))


def quantize_rows(
    x: FloatArray, input_scale: float, *, parallel: _core.Parallel = _SERIAL, isa: str = ""
) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """`format.quantize_rows` on the CPU: x float32 [R, K] -> E2M1 values doubled, int8
    [R, K], and block scales float32 [R, K/16]."""
    values, block_scales = _core.nvfp4_linear.quantize_rows(x, input_scale, parallel, isa)
    return values, block_scales
