"""Engines that hand everything on to another, and stop or fail where a test says so."""

import threading
from collections.abc import Sequence

from trtree import _core


class WrappedEngine(_core.Engine):
    """Another engine, unchanged."""

    def __init__(self, engine: _core.Engine) -> None:
        super().__init__()
        self.engine = engine

    def capabilities(self) -> _core.Capabilities:
        return self.engine.capabilities()

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        return self.engine.step(batch)

    def commit(self, commits: Sequence[_core.Commit]) -> None:
        self.engine.commit(list(commits))

    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        return self.engine.draft(list(requests), top_k)

    def load_state(self, snapshot: int, slot: int) -> None:
        self.engine.load_state(snapshot, slot)


class FailingEngine(WrappedEngine):
    """Fails once, in its ``at``-th draft, step, commit or load_state; "half": when it has done
    the first half of a commit."""

    def __init__(self, engine: _core.Engine, call: str, at: int) -> None:
        super().__init__(engine)
        self._call = call
        self._left = at

    @property
    def failed(self) -> bool:
        return self._left <= 0

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        self._count("step")
        return super().step(batch)

    def commit(self, commits: Sequence[_core.Commit]) -> None:
        self._count("commit")
        super().commit(commits[: len(commits) // 2])
        self._count("half")
        super().commit(commits[len(commits) // 2 :])

    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        self._count("draft")
        return super().draft(requests, top_k)

    def load_state(self, snapshot: int, slot: int) -> None:
        self._count("load_state")
        super().load_state(snapshot, slot)

    def _count(self, call: str) -> None:
        self._left -= call == self._call
        if self._left == 0 and call == self._call:
            raise RuntimeError(f"{call} failed")


class GatedEngine(WrappedEngine):
    """Waits before each step until it may be made.

    What a test does meanwhile finds requests running, however fast the engine is.
    """

    def __init__(self, engine: _core.Engine, steps: int = 0) -> None:
        """``steps``: as many may be made at once."""
        super().__init__(engine)
        self.waiting = threading.Event()  # it has come to a step that it may not make yet
        self._allowed = threading.Semaphore(steps)
        self._opened = False

    def allow(self, steps: int = 1) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        """From now on every step may be made."""
        self._opened = True
        self._allowed.release()

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        if not self._opened and not self._allowed.acquire(blocking=False):
            self.waiting.set()
            assert self._allowed.acquire(timeout=60), "nobody allows this step"
        return super().step(batch)
