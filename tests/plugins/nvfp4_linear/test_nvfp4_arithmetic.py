"""The arithmetic of the CPU kernels, bit by bit, as README.md defines it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linear_cases import ACTIVATIONS, ISAS, POOL, Case, assert_same_bits, even_bounds, fma
from trtree.plugins import nvfp4_linear
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.plugins.nvfp4_linear.reference import Activations

every_isa = pytest.mark.parametrize("isa", ISAS)
both_activations = pytest.mark.parametrize("activations", ACTIVATIONS)


def assert_quantizes_like_torch(x: torch.Tensor, input_scale: float) -> None:
    expected = nvfp4.quantize_rows(x, torch.tensor(input_scale))
    for isa in ISAS:
        values, scales = nvfp4_linear.quantize_rows(x.numpy(), input_scale, parallel=POOL, isa=isa)
        np.testing.assert_array_equal(values, (2 * expected.values).numpy())
        np.testing.assert_array_equal(scales, expected.block_scale.numpy())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    magnitude=st.integers(-40, 40),
    spread=st.integers(0, 12),
    input_exponent=st.integers(-44, 38),
)
def test_quantizes_like_torch(seed: int, magnitude: int, spread: int, input_exponent: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 64, generator=g) * 2.0**magnitude
    x *= torch.exp2(torch.randint(-spread, spread + 1, (9, 64), generator=g))
    scale = np.float32(10.0**input_exponent * (1 + torch.rand(1, generator=g).item()))
    assert_quantizes_like_torch(x, float(scale))


def test_quantizes_ties_to_even() -> None:
    """The largest element of each block, 6 * 32, makes its scale 32."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = [torch.nextafter(midpoints, torch.tensor(side)) for side in (0.0, 9.0)]
    values = torch.cat([midpoints, *near, nvfp4.E2M1_VALUES])
    x = torch.zeros(2 * len(values), 16)
    x[:, 0] = 6.0
    x[:, 5] = torch.cat([values, -values])
    assert_quantizes_like_torch(x * 32, 1.0)
    quantized, scales = nvfp4_linear.quantize_rows((x[:7] * 32).numpy(), 1.0)
    np.testing.assert_array_equal(quantized[:, 5], [0, 2, 2, 4, 4, 8, 8])
    np.testing.assert_array_equal(scales, np.full((7, 1), 32.0))


def test_quantizes_every_block_scale_and_every_tie_between_them() -> None:
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    half_way = (e4m3[1:] + e4m3[:-1]) / 2
    x = torch.zeros(127 + 3 * 126, 16)
    near = [torch.nextafter(half_way, torch.tensor(side)) for side in (0.0, 1e9)]
    x[:, 3] = 6 * torch.cat([e4m3, half_way, *near])
    assert_quantizes_like_torch(x, 1.0)


@pytest.mark.parametrize("x", [0.0, -0.0, 1e-45, 1e-38, 3e38, float("inf"), -float("inf")])
@pytest.mark.parametrize("input_scale", [1e-45, 1e-38, 1e-3, 1.0, 1e38])
def test_quantizes_extremes(x: float, input_scale: float) -> None:
    rows = torch.zeros(1, 32)
    rows[0, 7], rows[0, 8], rows[0, 20] = x, -x / 3, 1.0
    assert_quantizes_like_torch(rows, input_scale)


@every_isa
def test_integer_dots_are_exact(isa: str) -> None:
    """One block, scales 1: outputs are the dot products. Every pair of codes, then sums."""
    g = torch.Generator().manual_seed(5)
    codes = torch.arange(16, dtype=torch.uint8).reshape(16, 1).repeat(1, 16)
    codes = torch.cat([codes, torch.randint(0, 16, (30, 16), generator=g, dtype=torch.uint8)])
    ones = torch.ones(len(codes), 1).to(torch.float8_e4m3fn)
    weight = nvfp4.QuantizedTensor(nvfp4.pack(codes), ones, torch.tensor(1.0))
    x = torch.zeros(46, 16)
    x[:16, 9] = nvfp4.E2M1_VALUES
    x[16:] = nvfp4.E2M1_VALUES[torch.randint(0, 16, (30, 16), generator=g)]
    x[:, 0] = 6.0  # so that block scales are 1
    x[45], codes[45] = 6.0, 7  # the largest sum there is
    y = nvfp4_linear.linear(
        nvfp4_linear.pack(weight._replace(codes=nvfp4.pack(codes))),
        x.numpy(),
        out_features=len(codes),
        global_scale=1.0,
        input_scale=1.0,
        isa=isa,
    )
    expected = (x.double() @ nvfp4.E2M1_VALUES[codes.long()].double().T).numpy()
    np.testing.assert_array_equal(y, expected)
    assert y[45, 45] == 16 * 36


@every_isa
@both_activations
def test_every_block_scale(activations: Activations, isa: str) -> None:
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(-1, 1)
    codes = torch.zeros(127, 16, dtype=torch.uint8)
    codes[:, 9] = 2  # 1.0
    weight = nvfp4.QuantizedTensor(nvfp4.pack(codes), scales, torch.tensor(1.0))
    y = nvfp4_linear.linear(
        nvfp4_linear.pack(weight),
        np.full((1, 16), 6.0, dtype=np.float32),
        out_features=127,
        global_scale=1.0,
        input_scale=1.0 if activations == "nvfp4" else None,
        isa=isa,
    )
    np.testing.assert_array_equal(y[0], 6 * scales.float().flatten().numpy())


def written_arithmetic(case: Case, activations: Activations, bounds: list[int]) -> np.ndarray:
    """README.md's definition, step by step in float32."""
    weights = (2 * nvfp4.e2m1_values(case.weight.codes)).numpy()
    weight_scales = case.weight.block_scale.float().numpy()
    rows = nvfp4.quantize_rows(case.x, torch.tensor(case.input_scale))
    bf16 = case.x.bfloat16().float().numpy()
    total = np.zeros((len(case.x), len(weights)), np.float32)
    for begin, end in pairwise(bounds):
        segment = np.zeros_like(total)
        for b in range(begin, end):
            w, scale = weights[:, 16 * b : 16 * b + 16], weight_scales[None, :, b]
            if activations == "nvfp4":
                dot = (2 * rows.values[:, 16 * b : 16 * b + 16].numpy()) @ w.T
                scale = rows.block_scale[:, b : b + 1].numpy() * scale
            else:
                scale, dot = scale / 256, np.zeros_like(total)
                for i in [2, 0, 3, 1, 6, 4, 7, 5, 10, 8, 11, 9, 14, 12, 15, 13]:
                    dot = fma(bf16[:, 16 * b + i, None], w[None, :, i], dot)
            segment = fma(dot, scale, segment)
        total = total + segment
    return total * case.output_scale(activations) + case.bias.numpy()


@every_isa
@both_activations
@pytest.mark.parametrize(
    ("shape", "bounds"), [((4, 20, 48), even_bounds(3)), ((3, 18, 400), [0, 5, 5, 25])]
)
def test_written_arithmetic(
    shape: tuple[int, int, int], bounds: list[int], activations: Activations, isa: str
) -> None:
    case = Case(*shape, seed=7)
    expected = written_arithmetic(case, activations, bounds)
    assert_same_bits(case.run(activations, isa=isa, segment_bounds=bounds), expected)


@every_isa
def test_bf16_rounding(isa: str) -> None:
    """Ties to even, and magnitudes under 2^-100 become zero."""
    codes = torch.full((1, 8), 0x22, dtype=torch.uint8)  # 1.0
    ones = torch.ones(1, 1).to(torch.float8_e4m3fn)
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8]
    tiny = [2.0**-100, 2.0**-100 * (1 - 2**-24), -(2.0**-101), 1e-40]
    values = torch.tensor([*ties, 1e38, *tiny])
    x = torch.zeros(len(values), 16)
    x[:, 6] = values
    y = nvfp4_linear.linear(
        nvfp4_linear.pack(nvfp4.QuantizedTensor(codes, ones, torch.tensor(1.0))),
        x.numpy(),
        out_features=1,
        global_scale=1.0,
        input_scale=None,
        isa=isa,
    )
    expected = torch.where(values.abs() < 2**-100, 0, values.bfloat16().float())
    np.testing.assert_array_equal(y[:, 0], expected.numpy())
    np.testing.assert_array_equal(y[:4, 0], [1.0, 1 + 2**-6, 1 + 2**-7, -1.0])
