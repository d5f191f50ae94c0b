"""The references of state that branches, against transformers' recurrences along each path."""

import random
from collections.abc import Sequence

import pytest
import torch

from planted import plant
from steps import path_to, random_tree
from trtree.plugins import branch_state
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.causal_conv.reference import causal_conv
from trtree.plugins.gated_delta_net import reference as delta
from trtree.plugins.gated_delta_net.reference import gated_delta_net

TOLERANCE = 1e-5
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 16
SLOTS = 5


def segments_of(rng: random.Random, sizes: Sequence[int]) -> list[StateSegment]:
    """Random trees of several requests, in slots of their own; the second is fresh."""
    segments, first = [], 0
    slots = rng.sample(range(SLOTS), len(sizes))
    for index, size in enumerate(sizes):
        _, parents = random_tree(rng, size - 1, 1000)
        segments.append(StateSegment(first, size, slots[index], index == 1, parents))
        first += size
    return segments


def paths(segments: Sequence[StateSegment]) -> list[tuple[StateSegment, list[int]]]:
    """Every row's path from the root, as rows of its segment."""
    return [(s, path_to(row, s.parents)) for s in segments for row in range(s.num_rows)]


def delta_operands(rows: int, seed: int) -> list[torch.Tensor]:
    """q, k, v, a, b, gates."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, KEY_HEADS, KEY_DIM)] * 2 + [(rows, HEADS, VALUE_DIM)] + [(rows, HEADS)] * 2
    return [*(torch.randn(*shape, generator=g) for shape in shapes), torch.randn(8, generator=g)]


def plain_delta(
    operands: Sequence[torch.Tensor], rows: Sequence[int], start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' recurrence along one path: the last output, and the state after it."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    q, k, v, a, b = (x[list(rows)][None] for x in operands[:5])
    a_log, dt_bias = operands[5].chunk(2)
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    repeat = HEADS // KEY_HEADS
    out, state = theirs.torch_recurrent_gated_delta_rule(
        q.repeat_interleave(repeat, dim=2),
        k.repeat_interleave(repeat, dim=2),
        v,
        g=g,
        beta=b.sigmoid(),
        initial_state=start[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0, -1], state[0]


@pytest.mark.parametrize("seed", range(6))
def test_delta_rows_are_the_recurrence_along_their_paths(seed: int) -> None:
    rng = random.Random(seed)
    segments = segments_of(rng, [rng.randint(1, 65), rng.randint(1, 30), 7])
    rows = sum(s.num_rows for s in segments)
    operands = delta_operands(rows, seed)
    committed = torch.randn(SLOTS, HEADS, KEY_DIM, VALUE_DIM)
    before = committed.clone()
    out, states = gated_delta_net(*operands, committed, segments)
    assert torch.equal(committed, before)  # read only until commit
    for segment, path in paths(segments):
        start = torch.zeros_like(before[0]) if segment.fresh else before[segment.slot]
        expected, state = plain_delta(operands, [segment.first_row + r for r in path], start)
        row = segment.first_row + path[-1]
        torch.testing.assert_close(out[row], expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(states[row], state, rtol=0, atol=TOLERANCE)
        kept = before.clone()
        branch_state.commit(kept, states, segment, path)
        torch.testing.assert_close(kept[segment.slot], state, rtol=0, atol=TOLERANCE)
        others = [slot for slot in range(SLOTS) if slot != segment.slot]
        assert torch.equal(kept[others], before[others])
        branch_state.commit(kept, states, segment, [])
        assert torch.equal(kept[others], before[others])


@pytest.mark.parametrize("kernel", [2, 4])
def test_conv_rows_see_their_ancestors(kernel: int) -> None:
    rng = random.Random(kernel)
    channels = 12
    segments = segments_of(rng, [65, 9, 2])
    rows = sum(s.num_rows for s in segments)
    x, weight = torch.randn(rows, channels), torch.randn(channels, kernel)
    committed = torch.randn(SLOTS, kernel - 1, channels)
    out, windows = causal_conv(x, weight, committed, segments)
    for segment, path in paths(segments):
        start = committed[segment.slot] * (0 if segment.fresh else 1)
        inputs = torch.cat([start, x[[segment.first_row + r for r in path]]])
        expected = torch.nn.functional.conv1d(inputs.T[None], weight[:, None], groups=channels)
        row = segment.first_row + path[-1]
        plain = torch.nn.functional.silu(expected[0, :, -1])
        torch.testing.assert_close(out[row], plain, rtol=0, atol=TOLERANCE)
        assert torch.equal(windows[row], inputs[1 - kernel :])


def test_a_planted_leak_between_siblings_is_caught(tmp_path: object) -> None:
    """Every row continuing the row before it, as if the tree were a chain."""
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    leak = plant(
        branch_state,
        "before = start if parent < 0 else states[segment.first_row + parent]",
        "before = start if index == 0 else states[-1]",
        tmp_path,
    )
    faulty = plant(
        delta,
        "from trtree.plugins.branch_state import StateSegment, walk",
        f"from trtree.plugins.branch_state import StateSegment\nfrom {leak.__name__} import walk",
        tmp_path,
    )
    operands = delta_operands(3, 0)
    committed = torch.randn(SLOTS, HEADS, KEY_DIM, VALUE_DIM)
    for parents, leaks in (([-1, 0, 1], False), ([-1, 0, 0], True)):
        segments = [StateSegment(0, 3, 2, False, parents)]
        right, _ = gated_delta_net(*operands, committed, segments)
        wrong, _ = faulty.gated_delta_net(*operands, committed, segments)
        apart = float((right - wrong).abs().max())
        assert (apart > 100 * TOLERANCE) == leaks
