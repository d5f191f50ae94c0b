"""The CPU kernels of dense linears: accuracy, equal bits, the written arithmetic, refusals."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trtree._core as _core
from linear_cases import ISAS, POOL, FloatArray, assert_same_bits, before_guard_page, fma
from trtree.plugins import dense_linear
from trtree.plugins.dense_linear.reference import dense_linear as reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Case:
    def __init__(self, rows: int, o: int, k: int, dtype: torch.dtype, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, k, generator=g)
        self.weight = torch.randn(o, k, generator=g).to(dtype)
        self.bias = torch.randn(o, generator=g)
        self.packed = dense_linear.pack(self.weight)

    def run(self, x: torch.Tensor | None = None, **options: object) -> FloatArray:
        x = self.x if x is None else x
        arguments = {
            "out_features": len(self.weight),
            "bias": self.bias.numpy(),
            "parallel": POOL,
            **options,
        }
        return dense_linear.linear(self.packed, self.weight.dtype, x.numpy(), **arguments)


def check(case: Case) -> None:
    """Within 1e-6 of the reference, relative to the products that were added up, and the
    same bits on every instruction set."""
    first = case.run(isa=ISAS[0])
    magnitude = reference(case.x.abs(), case.weight.abs(), case.bias.abs()).numpy()
    error = np.abs(first - reference(case.x, case.weight, case.bias).numpy())
    assert np.all(error <= 1e-6 * magnitude)
    for isa in ISAS[1:]:
        assert_same_bits(case.run(isa=isa), first)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 16, 112), (2, 40, 131), (129, 50, 96)])
def test_close_to_reference_and_equal_on_every_isa(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check(Case(*shape, dtype))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 40),
    o=st.integers(1, 70),
    k=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes(rows: int, o: int, k: int, dtype: torch.dtype, seed: int) -> None:
    check(Case(rows, o, k, dtype, seed))


@every_isa
@every_dtype
def test_a_row_depends_on_nothing_else(dtype: torch.dtype, isa: str) -> None:
    case = Case(40, 83, 200, dtype, seed=1)
    rows = [case.run(case.x[r : r + 1], isa=isa, parallel=_core.Serial()) for r in range(40)]
    alone = np.concatenate(rows)
    for n in [*range(2, 20), 33, 40]:
        assert_same_bits(case.run(case.x[:n], isa=isa), alone[:n])


@every_isa
def test_written_arithmetic(isa: str) -> None:
    """Per segment one chain of fused multiply-adds in K order, segments added in order.
    K is not a multiple of 16: its last block is partial."""
    case = Case(4, 20, 131, torch.bfloat16, seed=2)
    x, weight = case.x.numpy(), case.weight.float().numpy()
    total = np.zeros((4, 20), np.float32)
    for begin, end in pairwise(i * 9 // 8 for i in range(9)):
        segment = np.zeros_like(total)
        for k in range(16 * begin, min(16 * end, 131)):
            segment = fma(x[:, k, None], weight[None, :, k], segment)
        total = total + segment
    assert_same_bits(case.run(isa=isa), total + case.bias.numpy())


@every_isa
def test_partial_sums_and_bounds(isa: str) -> None:
    """Ranks with some segments each reach the bits of one rank with all of them."""
    case = Case(3, 20, 208, torch.bfloat16, seed=3)
    expected = case.run(isa=isa)
    whole, bounds = case.weight, [i * 13 // 8 for i in range(9)]
    total = np.zeros((3, 20), np.float32)
    for ours in (bounds[:5], bounds[4:]):
        columns = slice(16 * ours[0], 16 * ours[-1])
        case.packed = dense_linear.pack(whole[:, columns])
        sums = case.run(
            case.x[:, columns].contiguous(),
            isa=isa,
            segment_bounds=[bound - ours[0] for bound in ours],
            partial_sums=True,
        )
        assert sums.shape == (3, 4, 20)
        for segment in range(4):
            total += sums[:, segment]
    assert_same_bits(total + case.bias.numpy(), expected)


@every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_weight(dtype: torch.dtype, isa: str) -> None:
    """K = 1 and x = 1: outputs are the weights, subnormals and infinities included."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    weight = bits.view(dtype).reshape(-1, 1)
    y = dense_linear.linear(
        dense_linear.pack(weight),
        dtype,
        np.ones((1, 1), np.float32),
        out_features=2**16,
        isa=isa,
    )
    np.testing.assert_array_equal(y[0], weight.float().flatten().numpy())


@every_dtype
def test_rows_are_read_back(dtype: torch.dtype) -> None:
    case = Case(1, 37, 50, dtype)
    for row in (0, 15, 16, 36):
        values = dense_linear.unpack_row(case.packed, dtype, (37, 50), row)
        np.testing.assert_array_equal(values, case.weight[row].float().numpy())
    with pytest.raises(ValueError, match=r"\[37, 50\] has no row 37"):
        dense_linear.unpack_row(case.packed, dtype, (37, 50), 37)


@every_isa
@every_dtype
@pytest.mark.parametrize("shape", [(3, 17, 16), (9, 32, 65), (1, 5, 1)])
def test_reads_nothing_past_the_end(
    shape: tuple[int, int, int], dtype: torch.dtype, isa: str
) -> None:
    case = Case(*shape, dtype)
    expected = case.run(isa=isa)
    case.packed = before_guard_page(case.packed)
    case.x = torch.from_numpy(before_guard_page(case.x.numpy()))
    case.bias = torch.from_numpy(before_guard_page(case.bias.numpy()))
    assert_same_bits(case.run(isa=isa), expected)


def test_refusals() -> None:
    case = Case(2, 20, 50, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[21, 64\]: expected 4096 bytes, got 3200"):
        case.run(torch.zeros(2, 64), out_features=21, bias=None)
    with pytest.raises(ValueError, match="must rise from 0 to 4 blocks"):
        case.run(segment_bounds=[0, 3])
    with pytest.raises(ValueError, match='"float64": expected bfloat16'):
        dense_linear.pack(torch.zeros(2, 2, dtype=torch.float64))
