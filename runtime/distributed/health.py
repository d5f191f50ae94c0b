"""Which ranks are alive: each sends rank 0 a heartbeat from a thread of its own.

A heartbeat says that the process runs, not that its work goes on: a long step is no fault.
"""

import threading
import time
from typing import Any

from trtree.runtime.distributed.world import World

PERIOD = 0.5  # seconds between heartbeats
SILENCE = 5.0  # seconds after which a rank counts as lost

_BEAT = 1


class Heartbeats:
    """Sends this rank's heartbeats, or on rank 0 collects the others'."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._comm: Any = world.comm.Dup()
        self._stop = threading.Event()
        now = time.monotonic()
        self._last = dict.fromkeys(range(1, world.size), now)
        run = self._collect if world.rank == 0 else self._send
        self._thread = threading.Thread(target=run, name="heartbeats", daemon=True)
        self._thread.start()

    def lost(self) -> list[int]:
        """On rank 0: ranks that have been silent for longer than SILENCE."""
        oldest = time.monotonic() - SILENCE
        return [rank for rank, last in self._last.items() if last < oldest]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        beat, request = bytearray(1), None
        while not self._stop.wait(PERIOD):
            if request is None or request.Test():  # rank 0 may be late; one is enough
                request = self._comm.Isend(beat, 0, _BEAT)
        if request is not None:
            request.Wait()

    def _collect(self) -> None:
        beat = bytearray(1)
        while True:
            stopping = self._stop.wait(PERIOD / 2)
            for rank in self._last:
                while self._comm.Iprobe(rank, _BEAT):
                    self._comm.Recv(beat, rank, _BEAT)
                    self._last[rank] = time.monotonic()
            if stopping:
                return
