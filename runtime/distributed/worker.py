"""The ranks of a replica: its leader sends every engine call, the workers make it too."""

from typing import Any

import numpy as np

from trtree import _core
from trtree._core import distributed
from trtree.runtime.distributed.world import World, wait_for

_CALL, _STOP = 1, 2


class Replica:
    """One replica's ranks. Made by all of them together.

    ``calls`` and ``sums`` are communicators of their own, so that a call that waits to be
    received cannot be taken for a part of a step.
    """

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.calls: Any = world.split(number)
        self.sums: Any = self.calls.Dup()
        self.rank: int = self.calls.Get_rank()
        self.size: int = self.calls.Get_size()

    def collectives(self) -> distributed.MpiCollectives:
        return distributed.MpiCollectives(self._world.library(self.sums))

    def rank_on_node(self) -> int:
        """This rank's place among the job's ranks on its node."""
        return self._world.rank_on_node()

    def lead(self, part: _core.Engine) -> _core.Engine:
        """The engine for the executor of rank 0: every call is the workers' too."""
        if self.size == 1:
            return part
        return distributed.LeaderEngine.over_mpi(part, self._world.library(self.calls), _CALL)

    def work(self, part: _core.Engine) -> None:
        """Make the leader's calls until it says stop; asleep while there are none."""
        status = self._world.mpi.Status()
        while True:
            wait_for(lambda: self.calls.Iprobe(0, self._world.mpi.ANY_TAG, status))
            message = np.empty(status.Get_count(self._world.mpi.INT32_T), np.int32)
            self.calls.Recv(message, 0, status.Get_tag())
            if status.Get_tag() == _STOP:
                return
            distributed.make_call(part, message)

    def stop(self) -> None:
        """On the leader, once its executor makes no more calls: let the workers go."""
        for rank in range(1, self.size):
            self.calls.Send(np.empty(0, np.int32), rank, _STOP)
