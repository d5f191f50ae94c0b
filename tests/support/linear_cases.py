"""Random NVFP4 linears, and what else the tests of the CPU kernels share."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

import trtree._core as _core
from trtree.plugins import nvfp4_linear
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.plugins.nvfp4_linear.reference import Activations
from trtree.plugins.nvfp4_linear.reference import nvfp4_linear as reference

Scalar = TypeVar("Scalar", bound=np.generic)
FloatArray = npt.NDArray[np.float32]


def _supported(isa: str) -> bool:
    try:
        _core.cpu_isa(isa)
    except ValueError:
        return False
    return True


ISAS = [isa for isa in ("portable", "avx2", "avx512") if _supported(isa)]
ACTIVATIONS: list[Activations] = ["nvfp4", "bf16"]
POOL = _core.ThreadPool(2)


def assert_same_bits(a: FloatArray, b: FloatArray) -> None:
    np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def fma(a: FloatArray, b: FloatArray, c: FloatArray) -> FloatArray:
    """a * b + c in float32, rounded once: long doubles hold what the tests feed it."""
    wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return wide.astype(np.float32)


_guarded: list[mmap.mmap] = []  # kept, as their last pages cannot be touched


def before_guard_page(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A copy that ends where reading on is a fault."""
    pages = -(-array.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    _guarded.append(memory)
    data = np.frombuffer(memory, np.uint8)
    end = pages * mmap.PAGESIZE
    guard = ctypes.c_void_p(data.ctypes.data + end)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = data[end - array.nbytes : end].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def even_bounds(blocks: int) -> list[int]:
    return [i * blocks // 8 for i in range(9)]


class Case:
    """A linear and its input. Rows and blocks differ in magnitude, some are zero."""

    def __init__(self, rows: int, o: int, k: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        exponents = torch.randint(-6, 7, (rows, k // 16), generator=g)
        exponents[torch.rand(rows, k // 16, generator=g) < 0.1] = -1000
        x = torch.randn(rows, k, generator=g)
        self.x = x * torch.exp2(exponents.float()).repeat_interleave(16, 1)
        weight = torch.randn(o, k, generator=g)
        weight *= torch.exp2(torch.randint(-9, 1, (o, 1), generator=g))
        self.bias = torch.randn(o, generator=g)
        # Small enough for some blocks to saturate.
        self.input_scale = max(self.x.abs().max().item(), 1.0) / (6 * 448) / 4
        self.set_weight(nvfp4.quantize_weight(weight))

    def set_weight(self, weight: nvfp4.QuantizedTensor) -> None:
        self.weight = weight
        self.packed = nvfp4_linear.pack(weight)

    def run(
        self,
        activations: Activations,
        x: torch.Tensor | None = None,
        *,
        isa: str = "",
        bias: bool = True,
        segment_bounds: Sequence[int] | None = None,
        partial_sums: bool = False,
        parallel: _core.Parallel = POOL,
    ) -> FloatArray:
        return nvfp4_linear.linear(
            self.packed,
            (self.x if x is None else x).numpy(),
            out_features=len(self.weight.codes),
            global_scale=self.weight.global_scale.item(),
            input_scale=self.input_scale if activations == "nvfp4" else None,
            bias=self.bias.numpy() if bias else None,
            segment_bounds=segment_bounds,
            partial_sums=partial_sums,
            parallel=parallel,
            isa=isa,
        )

    def reference(self, activations: Activations, magnitudes: bool = False) -> FloatArray:
        """With `magnitudes`, the sum of the products' magnitudes: what errors scale with."""
        x, codes, bias = self.x, self.weight.codes, self.bias
        if magnitudes:
            x, codes, bias = x.abs(), codes & 0x77, bias.abs()
        weight = nvfp4.QuantizedTensor(codes, self.weight.block_scale, self.weight.global_scale)
        y: FloatArray = reference(
            x, weight, torch.tensor(self.input_scale), activations, bias
        ).numpy()
        return y

    def output_scale(self, activations: Activations) -> np.float32:
        """What segment sums are multiplied by."""
        input_scale = self.input_scale if activations == "nvfp4" else None
        scale = nvfp4_linear.output_scale(self.weight.global_scale.item(), input_scale)
        return np.float32(scale)
