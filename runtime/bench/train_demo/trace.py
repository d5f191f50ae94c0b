"""Continuations by the exported target on the CPU engine, with what the drafter says on the way.

The engine is driven a token at a time, so that greedy and sampled text, with and without a
drafter, come from one loop, and the target is the checkpoint's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtree import _core
from trtree.build import builder
from trtree.build.options import BuildOptions
from trtree.runtime.session import Session


@dataclass(frozen=True)
class Draft:
    """One block after a seed: log_probs float32 and token_ids int32, both [depth, k]."""

    log_probs: NDArray[np.float32]
    token_ids: NDArray[np.int32]


@dataclass(frozen=True)
class Continuation:
    """Tokens chosen after a prompt, and the drafts made with each of the first ones as seed."""

    tokens: list[int]
    drafts: list[Draft]


class Tracer:
    """One request at a time on an engine.

    Args:
        target: folder of the checkpoint.
        drafter: folder of the drafter, if there is to be one.
        engine: folder to build the engine in.
        activations: of quantized linears; None for the checkpoint's own.
    """

    def __init__(
        self, target: Path, drafter: Path | None, engine: Path, activations: str | None = None
    ) -> None:
        options = BuildOptions(
            checkpoint=target, drafter=drafter, output=engine, max_batch_size=1, kv_tokens=1024
        ).with_overrides({"activations": activations})
        self._session = Session(builder.write(builder.describe(options)), num_threads=1)
        self._engine = self._session.engine
        found = self._engine.capabilities()
        self._pages = list(range(found.num_pages))
        self._vocab = found.vocab_size
        self._top_k = found.max_top_k
        self._length = 0

    def _sequence(self) -> _core.Sequence:
        return _core.Sequence(1, 0, self._length, self._pages)

    def reset(self) -> None:
        """Forget what was read so far."""
        self._length = 0

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Commit tokens; returns the logits [vocab] of what follows them."""
        rows = list(range(len(tokens)))
        request = _core.SegmentRequest(
            self._sequence(), list(tokens), [row - 1 for row in rows], rows[-1:], True
        )
        logits = self._engine.step(_core.RowBatch([request])).logits
        self._engine.commit([_core.Commit(self._sequence(), rows)])
        self._length += len(tokens)
        return np.asarray(logits, dtype=np.float32).reshape(self._vocab)

    def draft(self, seed: int) -> Draft:
        """The drafter's block after what was read, with `seed` as its bonus token."""
        request = _core.DraftRequest(self._sequence(), seed)
        result = self._engine.draft([request], self._top_k)
        return Draft(np.asarray(result.log_probs)[0], np.asarray(result.token_ids)[0])

    def go_on(
        self,
        prompt: Sequence[int],
        count: int,
        stops: Collection[int],
        rng: np.random.Generator | None = None,
        drafts: int = 0,
    ) -> Continuation:
        """Continue `prompt`, after what was read before, by `count` tokens or to a stop.

        The tokens are the argmax, or samples at temperature 1 where `rng` is given. The last one
        is not read. The first `drafts` tokens are drafted from.
        """
        logits = self.read(prompt)
        tokens: list[int] = []
        made: list[Draft] = []
        while True:
            tokens.append(_choose(logits, rng))
            if len(tokens) == count or tokens[-1] in stops:
                return Continuation(tokens, made)
            if len(made) < drafts:
                made.append(self.draft(tokens[-1]))
            logits = self.read(tokens[-1:])


def _choose(logits: NDArray[np.float32], rng: np.random.Generator | None) -> int:
    if rng is None:
        return int(logits.argmax())
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))
