"""Peak anonymous memory of a process, sampled from outside while it is busy.

Started as a script: ``memory.py PID`` samples until its standard input ends, then prints the
largest RssAnon it saw, in bytes. It imports next to nothing, so as to start at once.
"""

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_SECONDS = 0.02


class PeakMemory:
    """Context manager; ``grown`` is how many bytes a process, by default this one, had at most
    above its start."""

    grown = 0

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid

    def __enter__(self) -> "PeakMemory":
        self._start = anonymous_bytes(self._pid)
        self._sampler = subprocess.Popen(
            [sys.executable, "-S", __file__, str(self._pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._sampler.stdout is not None
        self._sampler.stdout.readline()  # it is sampling now
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        peak, _ = self._sampler.communicate()
        if kind is None:  # a signal to the process group ends the sampler too
            self.grown = max(0, int(peak) - self._start)


def anonymous_bytes(pid: int) -> int:
    """RssAnon now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon")


def _sample(pid: int) -> None:
    peak = anonymous_bytes(pid)
    print("sampling", flush=True)
    while not select.select([sys.stdin], [], [], _SECONDS)[0]:
        peak = max(peak, anonymous_bytes(pid))
    print(peak)


if __name__ == "__main__":
    _sample(int(sys.argv[1]))
