"""The ranks of a tensor-parallel engine as threads of one process, without MPI."""

import queue
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtree import _core
from trtree._core import cpu, distributed
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines.cpu import load_cpu_engine

TIMEOUT = 60  # seconds a rank waits for the others


class ThreadRanks(_core.Engine):
    """A tensor-parallel engine: calls reach the worker threads in the leader's wire form."""

    def __init__(self, engine: EngineDir, *, num_threads: int = 1) -> None:
        super().__init__()
        self._size: int = engine.manifest["mapping"]["tp_size"]
        self._barrier = threading.Barrier(self._size, timeout=TIMEOUT)
        self._parts: list[npt.NDArray[np.float32]] = [np.empty(0, np.float32)] * self._size
        self.parts = [
            load_cpu_engine(engine, num_threads=num_threads, collectives=self._collectives(rank))
            for rank in range(self._size)
        ]
        self._inboxes = [queue.SimpleQueue[npt.NDArray[np.int32]]() for _ in self.parts[1:]]
        for part, inbox in zip(self.parts[1:], self._inboxes, strict=True):
            threading.Thread(target=self._work, args=(part, inbox), daemon=True).start()
        self._leader = distributed.LeaderEngine(self.parts[0], self._send)

    def capabilities(self) -> _core.Capabilities:
        return self._leader.capabilities()

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        return self._leader.step(batch)

    def commit(self, commits: Sequence[_core.Commit]) -> None:
        self._leader.commit(list(commits))

    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        return self._leader.draft(list(requests), top_k)

    def load_state(self, snapshot: int, slot: int) -> None:
        self._leader.load_state(snapshot, slot)

    def _send(self, message: npt.NDArray[np.int32]) -> None:
        for inbox in self._inboxes:
            inbox.put(message.copy())

    def _work(self, part: _core.Engine, inbox: "queue.SimpleQueue[npt.NDArray[np.int32]]") -> None:
        while True:
            distributed.make_call(part, inbox.get())

    def _collectives(self, rank: int) -> cpu.Collectives:
        def all_gather(mine: npt.NDArray[np.float32], every: npt.NDArray[np.float32]) -> None:
            self._parts[rank] = mine
            self._barrier.wait()
            every[:] = np.concatenate(self._parts)
            self._barrier.wait()  # nobody's `mine` ends before all have read it

        return cpu.PythonCollectives(rank, self._size, all_gather)
