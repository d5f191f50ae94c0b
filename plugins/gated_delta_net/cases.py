"""The shared test table: what every implementation of the gated delta rule is held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trtree.plugins.branch_cases import ROWS, SHAPES, make_segments, path_to
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.gated_delta_net.reference import gated_delta_net
from trtree.plugins.tree_attention.cases import assert_rounded, normal_values

# key heads, value heads, key_dim, value_dim
HEADS = ((1, 1, 64, 64), (1, 2, 128, 128), (2, 4, 64, 128), (1, 1, 256, 256))
# How much is forgotten, and how alike keys are: alike keys that are never forgotten are what
# powers of the coupling matrix do not survive.
GATES = ("usual", "nothing forgotten", "all forgotten")
KEYS = ("random", "alike")
DTYPES = (torch.bfloat16, torch.float32)
# Of float32 sums, beside the largest number among them.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class DeltaCase:
    rows: tuple[int, ...]
    shape: str
    heads: tuple[int, int, int, int]
    gates: str = "usual"
    keys: str = "random"
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        heads = "x".join(map(str, self.heads))
        what = f"{self.gates}-{self.keys}-{str(self.dtype).removeprefix('torch.')}"
        return f"rows{'+'.join(map(str, self.rows))}-{self.shape}-{heads}-{what}".replace(" ", "_")


@dataclass(frozen=True)
class DeltaCaseInputs:
    """``gated_delta_net``'s operands; gates and committed are float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    gates: torch.Tensor
    committed: torch.Tensor
    segments: list[StateSegment]


# Outputs [rows, heads, value_dim], and a commit: paths by request -> committed states, of which
# nothing may have changed but what was committed.
Committer = Callable[[Sequence[Sequence[int]]], torch.Tensor]
DeltaImplementation = Callable[[DeltaCaseInputs], tuple[torch.Tensor, Committer]]


def delta_cases() -> list[DeltaCase]:
    """Rows with trees in turn; every head size; and what is numerically hard."""
    small = HEADS[0]
    cases = [
        DeltaCase(rows, SHAPES[i % 4], small, dtype=DTYPES[i % 2]) for i, rows in enumerate(ROWS)
    ]
    cases += [DeltaCase((17, 3), "tree", heads) for heads in HEADS[1:]]
    cases += [
        DeltaCase((64, 9), "chain", small, gates, keys, torch.float32)
        for gates in GATES
        for keys in KEYS
    ]
    cases.append(DeltaCase((33, 4), "forest", small, GATES[1], KEYS[1]))
    return cases


def make_inputs(case: DeltaCase) -> DeltaCaseInputs:
    generator = torch.Generator().manual_seed(sum(case.rows) + case.heads[2])
    key_heads, heads, key_dim, value_dim = case.heads
    segments = make_segments(case.rows, case.shape, seed=sum(case.rows))
    rows = sum(case.rows)
    randn = normal_values(generator, case.dtype)
    k = randn(rows, key_heads, key_dim)
    b = randn(rows, heads)
    if case.keys == "alike":
        k, b = k[:1].expand_as(k).contiguous(), torch.full_like(b, 4.0)
    forgetting = {"usual": 0.0, "nothing forgotten": -30.0, "all forgotten": 60.0}[case.gates]
    gates = torch.randn(2, heads, generator=generator)
    gates[1] += forgetting
    return DeltaCaseInputs(
        randn(rows, key_heads, key_dim),
        k,
        randn(rows, heads, value_dim),
        randn(rows, heads),
        b,
        gates.flatten(),
        torch.randn(len(segments) + 1, heads, key_dim, value_dim, generator=generator),
        segments,
    )


def check(case: DeltaCase, run: DeltaImplementation) -> None:
    """Outputs of all rows, and the states after paths to a few of them.

    Raises:
        AssertionError: says what is off, and where.
    """
    inputs = make_inputs(case)
    # In float64 throughout: no state is rounded on the way.
    exact, states = gated_delta_net(
        inputs.q,
        inputs.k,
        inputs.v.double(),
        inputs.a,
        inputs.b,
        inputs.gates,
        inputs.committed.double(),
        inputs.segments,
    )
    out, commit = run(inputs)
    slack = TOLERANCE * max(1.0, float(exact.abs().max()))
    assert_rounded("out", out, exact, slack)
    for choose in (lambda s: s.num_rows - 1, lambda s: s.num_rows // 2, lambda s: -1):
        paths = [path_to(segment, choose(segment)) for segment in inputs.segments]
        expected = inputs.committed.double()
        for segment, path in zip(inputs.segments, paths, strict=True):
            if path:
                expected[segment.slot] = states[segment.first_row + path[-1]]
        slack = TOLERANCE * max(1.0, float(expected.abs().max()))
        assert_rounded(f"state after {paths}", commit(paths), expected, slack)
