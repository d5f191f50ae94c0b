"""E4M3 as the CPU's KV cache keeps it: every code, every tie, all instruction sets alike."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from trtree import _core
from trtree._core import tree_attention as kernels

NAN = 0x7F


def isas() -> Iterator[str]:
    """That this CPU and this build have."""
    for isa in ("portable", "avx2", "avx512"):
        try:
            kernels.encode(np.zeros(16, np.float32), 1.0, isa)
        except ValueError:
            continue
        yield isa


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in set(isas()):
        pytest.skip(f"no {request.param} here")
    return str(request.param)


def magnitudes() -> np.ndarray:
    """What codes 0 to 0x7e stand for, from the format's definition (arXiv 2209.05433)."""
    codes = np.arange(NAN)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest code, of two as near the even one, by comparing with the middles between
    neighbours, which float64 holds exactly; NaN for NaN."""
    values = magnitudes()
    middles = (values[:-1] + values[1:]) / 2
    wide = np.abs(x.astype(np.float64))
    below = np.searchsorted(middles, wide, side="left")
    tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == wide)
    code = np.where(tie & (below % 2 == 1), below + 1, below)
    code = np.where(np.isnan(x), NAN, code)
    return (code | np.signbit(x) * 0x80).astype(np.uint8)


def test_every_code(isa: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(expected[:NAN], magnitudes())
    found = kernels.decode(codes, 1.0, isa)
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found).sum() == 2
    np.testing.assert_array_equal(kernels.decode(codes, 0.3, isa), expected * np.float32(0.3))
    numbers = np.delete(codes, [NAN, 0x80 + NAN])
    again = kernels.encode(np.resize(expected[numbers], 256), 1.0, isa)
    np.testing.assert_array_equal(again, np.resize(numbers, 256))


def test_ties_and_their_neighbours(isa: str) -> None:
    values = magnitudes().astype(np.float32)
    middles = (values[:-1] + values[1:]) / 2
    near = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
    x = np.concatenate([middles, *near, values, np.float32([2**-10, 2**-149, 464, 1e38, np.inf])])
    x = np.concatenate([x, -x, [np.nan, -0.0]]).astype(np.float32)
    x = np.pad(x, (0, -len(x) % 16))
    np.testing.assert_array_equal(kernels.encode(x, 1.0, isa), nearest(x))


@pytest.mark.parametrize("scale", [1.0, 0.0123, 7.5])
def test_numbers_of_every_size(isa: str, scale: float) -> None:
    """Random bits over all of float32; the quotient is rounded first, as the contract says."""
    bits = np.random.default_rng(1).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    spread = np.random.default_rng(2).normal(size=1 << 16) * 10.0 ** np.linspace(-5, 4, 1 << 16)
    for x in (bits.view(np.float32), spread.astype(np.float32)):
        with np.errstate(over="ignore", invalid="ignore"):
            quotient = x / np.float32(scale)
        found = kernels.encode(x, scale, isa)
        expected = nearest(quotient)
        nan = np.isnan(quotient)  # whose sign is nobody's business
        np.testing.assert_array_equal(found[~nan], expected[~nan])
        assert (found[nan] & 0x7F == NAN).all()


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="15 numbers are no multiple of 16"):
        kernels.encode(np.zeros(15, np.float32), 1.0)
    assert _core.tree_attention is kernels
