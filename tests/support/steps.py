"""Driving an engine by hand: prefill, plain decoding, and trees over a prefix."""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtree import _core

Logits = npt.NDArray[np.float32]


def run_rows(
    engine: _core.Engine, requests: Sequence[tuple[_core.Sequence, list[int], list[int]]]
) -> list[Logits]:
    """One step; per request (sequence, token ids, parents) the logits [rows, vocab]."""
    batch = _core.RowBatch(
        [
            _core.SegmentRequest(at, tokens, parents, list(range(len(tokens))), True)
            for at, tokens, parents in requests
        ]
    )
    result = engine.step(batch)
    logits = result.logits.reshape(batch.num_rows, -1)
    assert result.argmax.tolist() == logits.argmax(axis=1).tolist()
    ends = np.cumsum([len(tokens) for _, tokens, _ in requests])[:-1]
    return np.split(logits, ends)


def prefill(engine: _core.Engine, at: _core.Sequence, tokens: list[int]) -> Logits:
    """Run and commit a chain behind the committed prefix; its logits [rows, vocab]."""
    (logits,) = run_rows(engine, [(at, tokens, list(range(-1, len(tokens) - 1)))])
    engine.commit([_core.Commit(at, list(range(len(tokens))))])
    return logits


def random_tree(rng: random.Random, nodes: int, vocab: int) -> tuple[list[int], list[int]]:
    """Token ids and parents of a random tree with a root; siblings differ."""
    tokens, parents = [rng.randrange(vocab)], [-1]
    taken: set[tuple[int, int]] = set()
    while len(tokens) <= nodes:
        parent = rng.randrange(max(0, len(tokens) - 8), len(tokens))
        token = rng.randrange(vocab)
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """Rows from the root to ``row``."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]
