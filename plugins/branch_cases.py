"""Rows for the shared test tables of state that branches: requests, slots, trees."""

import random
from collections.abc import Sequence

import torch

from trtree.plugins.branch_state import StateSegment
from trtree.plugins.tree_attention.cases import pack_mask

# Rows by request; the second request is fresh.
ROWS: tuple[tuple[int, ...], ...] = (
    (1,),
    (2, 1),
    (17, 5, 1),
    (31, 33),
    (16, 32, 15),
    (65, 17, 2),
    (129, 3),
)
SHAPES = ("tree", "chain", "star", "forest")


def make_segments(rows: Sequence[int], shape: str, seed: int) -> list[StateSegment]:
    """Requests in shuffled slots, of which there is one more than they are."""
    rng = random.Random(seed)
    slots = rng.sample(range(len(rows) + 1), len(rows))
    segments, first = [], 0
    for index, count in enumerate(rows):
        parents = make_parents(count, shape, rng)
        segments.append(StateSegment(first, count, slots[index], index == 1, parents))
        first += count
    return segments


def make_parents(rows: int, shape: str, rng: random.Random) -> list[int]:
    """A chain; a root's many children; a tree whose recent rows are likelier parents; or
    several trees, rows that continue the committed state."""
    if shape == "chain":
        return list(range(-1, rows - 1))
    if shape == "star":
        return [-1] + [0] * (rows - 1)
    least = -1 if shape == "forest" else 0
    return [-1, *(rng.randint(max(least, row - 9), row - 1) for row in range(1, rows))]


def masks(segments: Sequence[StateSegment]) -> torch.Tensor:
    """Ancestors and self, int32 [rows, words], LSB first."""
    words = (max(s.num_rows for s in segments) + 31) // 32
    return torch.cat([pack_mask(list(s.parents), words) for s in segments])


def path_to(segment: StateSegment, row: int) -> list[int]:
    """Rows of the segment from the committed state to ``row``."""
    path = []
    while row >= 0:
        path.append(row)
        row = segment.parents[row]
    return path[::-1]
