"""The processes that mpirun started, and how a job of them ends.

Nothing beyond mpi4py is assumed of an MPI. A rank that fails, or leaves before it is told
to, takes the job with it: ranks that wait for it would wait for ever.
"""

import atexit
import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from trtree._core import distributed
from trtree.runtime.distributed.layout import JobError

# Set by the launchers of MPICH (and Slurm), Open MPI and other users of PMIx.
_LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")
# A launcher may drop what a rank said just before it aborted: seconds to let it through.
_LAST_WORDS = 0.3
# Waiting for others costs no core: the longest sleep between two looks, in seconds.
LONGEST_SLEEP = 0.005


class World:
    """All ranks of the job. ``comm`` is private to this package."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.comm: Any = mpi.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.host = socket.gethostname()
        self._armed = False

    @classmethod
    def connect(cls, timeout: float) -> "World | None":
        """The world that a launcher started this process in; None without a launcher.

        A rank that does not come up within ``timeout`` seconds ends the job.

        Raises:
            JobError: mpi4py is missing, or its MPI does not let threads call it at once.
        """
        launcher = next((name for name in _LAUNCHERS if name in os.environ), None)
        if launcher is None:
            return None
        waiting = (
            f"error: a rank on {socket.gethostname()}: not all ranks have joined MPI after "
            f"{timeout:.0f} s; one of them did not start, or hangs before it opens the engine"
        )
        with distributed.Watchdog(timeout, waiting):
            return cls._connect(launcher)

    @classmethod
    def _connect(cls, launcher: str) -> "World":
        try:
            mpi = importlib.import_module("mpi4py.MPI")  # waits for all ranks
        except (ImportError, RuntimeError) as error:
            raise JobError(
                f"started by an MPI launcher ({launcher} is set), but mpi4py cannot be used "
                f"({error}); pip install mpi4py, and the MPI whose mpirun this is"
            ) from None
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise JobError(
                f"{mpi.Get_library_version().splitlines()[0]}: gives thread level "
                f"{mpi.Query_thread()}, and MPI_THREAD_MULTIPLE ({mpi.THREAD_MULTIPLE}) is needed"
            )
        world = cls(mpi)
        launched = os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE"))
        if launched is not None and int(launched) != world.size:
            raise JobError(
                f"mpirun started {launched} ranks, mpi4py sees {world.size}: its MPI is not the "
                f"launcher's ({mpi.Get_library_version().splitlines()[0]})"
            )
        return world

    # How a job ends

    def guard(self) -> None:
        """From here on an uncaught exception, or leaving before ``release``, ends the job."""
        self._armed = True
        if self.size == 1:
            return
        sys.excepthook = self._on_exception
        threading.excepthook = lambda args: self._on_exception(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )
        atexit.register(self._on_exit)
        if self.rank > 0:
            # The launcher hands its signals to every rank; rank 0 decides what they mean.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)

    def release(self) -> None:
        """All ranks have agreed to leave."""
        self._armed = False

    def abort(self, why: str) -> None:
        """End every rank of the job with status 1."""
        print(f"error: rank {self.rank} on {self.host}: {why}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(_LAST_WORDS)
        self.mpi.COMM_WORLD.Abort(1)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        if self._armed:
            self.abort(f"{kind.__name__}; ending the job")

    def _on_exit(self) -> None:
        if self._armed:
            self.abort("leaves while the others work; ending the job")

    # Communicators

    def split(self, color: int) -> Any:
        """The ranks of one color, in order."""
        return self.comm.Split(color, self.rank)

    def rank_on_node(self) -> int:
        """This rank's place among those of its node. All ranks call it together."""
        node = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        rank: int = node.Get_rank()
        node.Free()
        return rank

    def threads_per_rank(self) -> int:
        """This rank's share of its processors, which other ranks of the node may have too.

        All ranks call it together.
        """
        node = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        mine = os.sched_getaffinity(0)
        sharing = [other == mine for other in node.allgather(mine)]
        node.Free()
        return max(1, len(mine) // sharing.count(True))

    def library(self, comm: Any) -> distributed.MpiLibrary:
        """What C++ needs to call this MPI by itself."""
        mpi = self.mpi
        # The module depends on the MPI it was linked or bound to: the search includes that.
        functions = ctypes.CDLL(mpi.__file__)

        def address(name: str) -> int:
            value = ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
            assert value is not None
            return value

        return distributed.MpiLibrary(
            all_gather=address("MPI_Iallgather"),
            test=address("MPI_Test"),
            send=address("MPI_Send"),
            communicator=mpi._handleof(comm),
            int32_type=mpi._handleof(mpi.INT32_T),
            float_type=mpi._handleof(mpi.FLOAT),
            rank=comm.Get_rank(),
            size=comm.Get_size(),
        )


def sleeps() -> Iterator[float]:
    """Seconds to sleep between looks for a message: short at first, then ever longer."""
    seconds = 2e-5
    while True:
        yield seconds
        seconds = min(LONGEST_SLEEP, seconds * 1.5)


def wait_for(look: Callable[[], Any], timeout: float | None = None) -> Any:
    """What ``look`` returns once it is true; None when ``timeout`` seconds have passed."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for seconds in sleeps():
        if found := look():
            return found
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            seconds = min(seconds, left)
        time.sleep(seconds)
    raise AssertionError  # sleeps() has no end
