"""Mean draft log-probs per depth and rank, for static trees."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtree import _core
from trtree.runtime.executor import (
    DecodingMode,
    Executor,
    Request,
    SpeculativeConfig,
)


class RecordingEngine(_core.Engine):
    """Passes every call on to another engine and sums up the drafter's log-probs."""

    def __init__(self, engine: _core.Engine, top_k: int) -> None:
        super().__init__()
        self._engine = engine
        self._top_k = top_k
        depth = engine.capabilities().block_size - 1
        self._sum = np.zeros((depth, top_k), dtype=np.float64)
        self.rounds = 0

    def capabilities(self) -> _core.Capabilities:
        return self._engine.capabilities()

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        return self._engine.step(batch)

    def commit(self, commits: Sequence[_core.Commit]) -> None:
        self._engine.commit(commits)

    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        result = self._engine.draft(requests, max(top_k, self._top_k))
        self._sum += result.log_probs[..., : self._top_k].sum(axis=0, dtype=np.float64)
        self.rounds += len(requests)
        return _core.DraftResult(
            np.ascontiguousarray(result.log_probs[..., :top_k]),
            np.ascontiguousarray(result.token_ids[..., :top_k]),
        )

    def mean_log_probs(self) -> NDArray[np.float32]:
        """float32 [depth, top_k], over all rounds seen."""
        return (self._sum / max(1, self.rounds)).astype(np.float32)


def calibrate(
    engine: _core.Engine, prompts: Sequence[Sequence[int]], *, tree_budget: int, max_tokens: int
) -> NDArray[np.float32]:
    """Decode the prompts with dynamic trees; returns mean log-probs float32 [depth, k].

    k is the number of ranks a tree of ``tree_budget`` nodes can use.
    """
    capabilities = engine.capabilities()
    top_k = min(max(1, tree_budget), capabilities.max_top_k)
    recording = RecordingEngine(engine, top_k)
    executor = Executor(recording)
    speculative = SpeculativeConfig(DecodingMode.TREE, tree_budget=tree_budget)
    for prompt in prompts:
        room = capabilities.max_seq_len - len(prompt)
        executor.enqueue_request(
            Request(list(prompt), max_tokens=min(max_tokens, room), speculative=speculative)
        )
    while executor.await_responses():
        pass
    return recording.mean_log_probs()
