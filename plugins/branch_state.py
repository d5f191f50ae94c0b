"""State that every row of a step continues from its parent: a convolution's window, a recurrence.

A request's committed state lies in its slot and is read only until commit. Row i of a step
has a state of its own, its parent's moved on by one token; sibling rows never see each
other's. Commit makes the last accepted row's state the committed one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateSegment:
    """One request's rows of a batch.

    slot: where its committed state lies. fresh: nothing is committed, the state is zero
    whatever the slot holds. parents: int [num_rows], the row of the segment that each
    continues, -1 the committed state; a parent comes before its children.
    """

    first_row: int
    num_rows: int
    slot: int
    fresh: bool
    parents: Sequence[int]


def walk(
    committed: torch.Tensor,
    segments: Sequence[StateSegment],
    move: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Every row's state, [rows, ...]: ``move(row, parent's state)`` for each row in turn.

    committed: [slots, ...], the requests' committed states.
    """
    states: list[torch.Tensor] = []
    for segment in segments:
        start = committed[segment.slot]
        start = torch.zeros_like(start) if segment.fresh else start
        for index, parent in enumerate(segment.parents):
            before = start if parent < 0 else states[segment.first_row + parent]
            states.append(move(segment.first_row + index, before))
    return torch.stack(states)


def commit(
    committed: torch.Tensor, states: torch.Tensor, segment: StateSegment, rows: Sequence[int]
) -> None:
    """Make the state of the last of the accepted ``rows`` of ``segment`` the committed one.

    committed: [slots, ...]. states: of all rows of the step, from ``walk``.
    """
    if rows:
        committed[segment.slot] = states[segment.first_row + rows[-1]]
