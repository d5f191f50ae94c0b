"""The shared test table: what every implementation of the convolution is held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trtree.plugins.branch_cases import ROWS, SHAPES, make_segments, path_to
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.causal_conv.reference import causal_conv
from trtree.plugins.tree_attention.cases import assert_rounded, normal_values

TOLERANCE = 2e-6


@dataclass(frozen=True)
class ConvCase:
    rows: tuple[int, ...]
    shape: str
    channels: int
    kernel: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        rows, dtype = "+".join(map(str, self.rows)), str(self.dtype).removeprefix("torch.")
        return f"rows{rows}-{self.shape}-c{self.channels}-k{self.kernel}-{dtype}"


@dataclass(frozen=True)
class ConvCaseInputs:
    """``causal_conv``'s operands; weight is float32, committed is of x's dtype."""

    x: torch.Tensor
    weight: torch.Tensor
    committed: torch.Tensor
    segments: list[StateSegment]


# Outputs [rows, channels], and a commit: paths by request -> committed windows.
Committer = Callable[[Sequence[Sequence[int]]], torch.Tensor]
ConvImplementation = Callable[[ConvCaseInputs], tuple[torch.Tensor, Committer]]


def conv_cases() -> list[ConvCase]:
    return [
        ConvCase(
            rows,
            SHAPES[(i + kernel) % 4],
            (64, 100, 192)[i % 3],
            kernel,
            (torch.bfloat16, torch.float32)[(i + kernel) % 2],
        )
        for i, rows in enumerate(ROWS)
        for kernel in (2, 4, 5)[i % 2 :]
    ]


def make_inputs(case: ConvCase) -> ConvCaseInputs:
    generator = torch.Generator().manual_seed(sum(case.rows) + case.channels)
    segments = make_segments(case.rows, case.shape, seed=sum(case.rows))
    randn = normal_values(generator, case.dtype)
    return ConvCaseInputs(
        randn(sum(case.rows), case.channels),
        torch.randn(case.channels, case.kernel, generator=generator),
        randn(len(segments) + 1, case.kernel - 1, case.channels),
        segments,
    )


def check(case: ConvCase, run: ConvImplementation) -> None:
    """Outputs of all rows; windows after paths of every length to a few rows, to the bit.

    Raises:
        AssertionError: says what is off, and where.
    """
    inputs = make_inputs(case)
    exact, windows = causal_conv(
        inputs.x.double(), inputs.weight, inputs.committed.double(), inputs.segments
    )
    out, commit = run(inputs)
    assert_rounded("out", out, exact, TOLERANCE * max(1.0, float(exact.abs().max())))
    for choose in (lambda s: s.num_rows - 1, lambda s: s.num_rows // 2, lambda s: -1, lambda s: 0):
        paths = [path_to(segment, choose(segment)) for segment in inputs.segments]
        expected = inputs.committed.clone()
        for segment, path in zip(inputs.segments, paths, strict=True):
            if path:
                expected[segment.slot] = windows[segment.first_row + path[-1]].to(case.dtype)
        wrong = commit(paths) != expected
        assert not wrong.any(), f"window after {paths}: {int(wrong.sum())} elements differ"
