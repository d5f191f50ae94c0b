"""The CPU kernels of NVFP4 linears: accuracy, equal bits, segments, memory, refusals."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trtree._core as _core
from linear_cases import ACTIVATIONS, ISAS, Case, assert_same_bits, before_guard_page, even_bounds
from trtree.plugins import nvfp4_linear
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.plugins.nvfp4_linear.reference import Activations

every_isa = pytest.mark.parametrize("isa", ISAS)
both_activations = pytest.mark.parametrize("activations", ACTIVATIONS)


def check(case: Case, activations: Activations) -> None:
    """Within 1e-6 of the reference, relative to the products that were added up, and the
    same bits on every instruction set."""
    first = case.run(activations, isa=ISAS[0])
    error = np.abs(first - case.reference(activations))
    assert np.all(error <= 1e-6 * case.reference(activations, magnitudes=True))
    for isa in ISAS[1:]:
        assert_same_bits(case.run(activations, isa=isa), first)


@both_activations
@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 16, 112), (2, 40, 128), (129, 50, 96)])
def test_close_to_reference_and_equal_on_every_isa(
    shape: tuple[int, int, int], activations: Activations
) -> None:
    check(Case(*shape), activations)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 40),
    o=st.integers(1, 70),
    blocks=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    activations=st.sampled_from(ACTIVATIONS),
)
def test_random_shapes(rows: int, o: int, blocks: int, seed: int, activations: Activations) -> None:
    check(Case(rows, o, 16 * blocks, seed), activations)


@every_isa
@both_activations
def test_a_row_depends_on_nothing_else(activations: Activations, isa: str) -> None:
    case = Case(40, 83, 208, seed=1)
    rows = [
        case.run(activations, case.x[r : r + 1], isa=isa, parallel=_core.Serial())
        for r in range(40)
    ]
    alone = np.concatenate(rows)
    for n in [*range(2, 20), 33, 40]:
        assert_same_bits(case.run(activations, case.x[:n], isa=isa), alone[:n])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert_same_bits(case.run(activations, case.x[order], isa=isa), alone[order.numpy()])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_nothing(threads: int) -> None:
    case = Case(6, 700, 256, seed=3)
    expected = case.run("nvfp4", parallel=_core.Serial())
    pool = _core.ThreadPool(threads)
    assert pool.num_threads == threads
    for call in range(100):
        if call % 20 == 0:
            time.sleep(0.002)  # the pool's threads go to sleep
        assert_same_bits(case.run("nvfp4", parallel=pool), expected)


def test_a_nan_reaches_the_outputs_of_its_row() -> None:
    case = Case(2, 20, 64)
    case.x[0, 17] = float("nan")
    for isa in ISAS:
        for activations in ACTIVATIONS:
            y = case.run(activations, isa=isa)
            assert np.isnan(y[0]).all() and not np.isnan(y[1]).any()


@every_isa
@both_activations
def test_a_widened_linear_keeps_its_bits(activations: Activations, isa: str) -> None:
    """Its zero columns come last and join the last segment."""
    case = Case(5, 20, 208, seed=9)
    expected = case.run(activations, isa=isa)
    zeros = 112
    scales = torch.cat([case.weight.block_scale.float(), torch.ones(20, zeros // 16)], dim=1)
    codes = torch.nn.functional.pad(case.weight.codes, (0, zeros // 2))
    case.set_weight(case.weight._replace(codes=codes, block_scale=scales.to(torch.float8_e4m3fn)))
    case.x = torch.nn.functional.pad(case.x, (0, zeros))
    bounds = [*even_bounds(13)[:-1], 20]
    assert_same_bits(case.run(activations, isa=isa, segment_bounds=bounds), expected)


@every_isa
@both_activations
def test_ranks_with_some_segments_each_reach_the_same_bits(
    activations: Activations, isa: str
) -> None:
    case = Case(5, 37, 208, seed=11)
    expected = case.run(activations, isa=isa)
    whole, bounds = case.weight, even_bounds(13)
    sums = []
    for ours in (bounds[:4], bounds[3:]):
        first, last = ours[0], ours[-1]
        codes = whole.codes[:, 8 * first : 8 * last].contiguous()
        scales = whole.block_scale[:, first:last].contiguous()
        case.set_weight(nvfp4.QuantizedTensor(codes, scales, whole.global_scale))
        sums.append(
            case.run(
                activations,
                case.x[:, 16 * first : 16 * last].contiguous(),
                isa=isa,
                segment_bounds=[bound - first for bound in ours],
                partial_sums=True,
            )
        )
    gathered = np.concatenate(sums, axis=1)
    assert gathered.shape == (5, 8, 37)
    total = np.zeros((5, 37), np.float32)
    for segment in range(8):
        total += gathered[:, segment]
    assert_same_bits(total * case.output_scale(activations) + case.bias.numpy(), expected)


@every_isa
@both_activations
@pytest.mark.parametrize("shape", [(3, 17, 16), (9, 32, 64), (1, 5, 208)])
def test_reads_nothing_past_the_end(
    shape: tuple[int, int, int], activations: Activations, isa: str
) -> None:
    case = Case(*shape)
    expected = case.run(activations, isa=isa)
    case.packed = before_guard_page(case.packed)
    case.x = torch.from_numpy(before_guard_page(case.x.numpy()))
    case.bias = torch.from_numpy(before_guard_page(case.bias.numpy()))
    assert_same_bits(case.run(activations, isa=isa), expected)


def test_packed_weights_can_be_mapped_from_a_file(tmp_path: Path) -> None:
    case = Case(4, 50, 96)
    expected = case.run("nvfp4")
    path = tmp_path / "weights"
    path.write_bytes(bytes(128) + case.packed.tobytes())
    case.packed = np.memmap(path, np.uint8, "r", offset=128)
    assert_same_bits(case.run("nvfp4"), expected)


def test_packed_size() -> None:
    """0.5625 bytes per weight where O is a multiple of 16 and K of 64."""
    assert nvfp4_linear.packed_size(2048, 1024) == 2048 * 1024 * 9 // 16
    assert nvfp4_linear.packed_size(1, 16) == 576
    with pytest.raises(ValueError, match=r"\[4, 24\].*24 is not a positive multiple of 16"):
        nvfp4_linear.packed_size(4, 24)


def test_packed_bytes_are_checked() -> None:
    case = Case(2, 20, 64)
    whole = case.packed
    case.packed = whole[64:]
    with pytest.raises(ValueError, match=r"\[20, 64\]: expected 1152 bytes, got 1088"):
        case.run("nvfp4")
    room = np.zeros(whole.size + 128, np.uint8)
    start = 65 - room.ctypes.data % 64
    case.packed = room[start : start + whole.size]
    with pytest.raises(ValueError, match="must start at a multiple of 64"):
        case.run("nvfp4")


@pytest.mark.parametrize("bits", [0x7F, 0x81, 0xFF])
def test_block_scales_are_checked(bits: int) -> None:
    scales = torch.ones(20, 4).to(torch.float8_e4m3fn)
    scales.view(torch.uint8)[3, 2] = bits
    codes = torch.zeros(20, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[20, 64\]: block scale \[3, 2\] is negative or NaN"):
        nvfp4_linear.pack(nvfp4.QuantizedTensor(codes, scales, torch.tensor(1.0)))


@pytest.mark.parametrize("bounds", [[0, 2, 1, 4], [0, 3], [1, 4], [0], [0, *range(9), 4]])
def test_segment_bounds_are_checked(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="must rise from 0 to 4 blocks"):
        Case(2, 20, 64).run("nvfp4", segment_bounds=bounds)


def test_other_refusals() -> None:
    case = Case(2, 20, 64)
    refusals: list[tuple[str, Callable[[], object]]] = [
        ('isa "sse" is unknown', lambda: case.run("nvfp4", isa="sse")),
        ("K = 24 is not", lambda: case.run("nvfp4", case.x[:, :24].contiguous())),
        ("1 to 256 threads, not 0", lambda: _core.ThreadPool(0)),
    ]
    for scale in (0.0, -1.0, float("nan"), float("inf")):

        def run(scale: float = scale) -> object:
            case.input_scale = scale
            return case.run("nvfp4")

        refusals.append(("input_scale = .*finite and > 0", run))
    for message, call in refusals:
        with pytest.raises(ValueError, match=message):
            call()
    case.bias = case.bias[:3]
    with pytest.raises(ValueError, match="bias has 3 elements, the linear 20 outputs"):
        case.run("bf16")
