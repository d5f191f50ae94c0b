"""Text and figures of a request's outputs, as Triton's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtree.runtime.service import Chunk, Finish
from trtree.runtime.triton_repo.inputs import Array


@dataclass
class Output:
    """One output, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.log_probs += [t.log_probs.log_prob for t in chunk.tokens if t.log_probs is not None]
        self.finish = chunk.finish


def texts(values: Sequence[str]) -> Array:
    """A TYPE_STRING tensor."""
    return np.array([value.encode() for value in values], dtype=np.object_)


def integers(*values: int) -> Array:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def log_prob_rows(rows: Sequence[Sequence[float]]) -> Array:
    """Float32 [outputs, longest], the shorter filled with 0."""
    array = np.zeros((len(rows), max(map(len, rows), default=0)), np.float32)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


def acceptance(finishes: Sequence[Finish]) -> dict[str, Array]:
    """Over all outputs of a request: draft nodes verified and accepted, and what came of it."""
    found = [f.usage.statistics for f in finishes if f.usage.statistics is not None]
    drafted = sum(one.drafted_tokens for one in found)
    accepted = sum(one.accepted_tokens for one in found)
    return {
        "acceptance_rate": floats(accepted / drafted if drafted else 0.0),
        "total_accepted_draft_tokens": integers(accepted),
        "total_draft_tokens": integers(drafted),
    }
