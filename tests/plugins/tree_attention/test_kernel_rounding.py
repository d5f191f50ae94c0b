"""The kernels' integer rounding, over all float16 values and a sweep of float32 ones."""

import pytest
import torch
import triton
import triton.language as tl

from trtree.plugins.tree_attention.contract import E4M3_MAX
from trtree.plugins.tree_attention.kernels.numerics import round_to


@triton.jit
def _round_kernel(x, y, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + index, round_to(tl.load(x + index), y.dtype.element_ty))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    _round_kernel[(x.numel() // 4096,)](x, y, N=4096)
    return y


def values() -> torch.Tensor:
    """Every float16, which holds every tie between e4m3 neighbours, and random bits."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (65536,), generator=generator).to(torch.int32)
    return torch.cat([halves.view(torch.float16).float(), bits.view(torch.float32)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    x = values()
    if dtype == torch.float16:
        x = x[x.abs() < 65504][: 4096 * 20]
    expected = x.clamp(-E4M3_MAX, E4M3_MAX) if dtype == torch.float8_e4m3fn else x
    got, expected = rounded(x, dtype), expected.to(dtype)
    nan = x.isnan()
    assert got[nan].float().isnan().all()
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    assert torch.equal(got.view(bits)[~nan], expected.view(bits)[~nan])
