"""Starting jobs of job_driver.py with mpirun, whichever MPI it belongs to."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

DRIVER = Path(__file__).parent / "job_driver.py"
# Open MPI's launcher refuses root and more ranks than cores unless told; MPICH's ignores these.
LAUNCHER_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}


def mpirun() -> str:
    """The launcher beside this Python, or else on the path."""
    beside = Path(sys.executable).parent
    launcher = shutil.which("mpirun", path=f"{beside}:{os.environ['PATH']}")
    assert launcher, "mpirun is missing; pip install mpich"
    return launcher


class RunningJob:
    """A job under mpirun. Leaves no process and no shared memory of its own behind."""

    def __init__(self, ranks: int, engine: Path, action: str, *options: str) -> None:
        command = [mpirun(), "-n", str(ranks), sys.executable, str(DRIVER), str(engine), action]
        self._shared: set[Path] = set()
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | LAUNCHER_ENVIRONMENT,
            start_new_session=True,
        )

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes that run now."""
        found = {}
        for process in self._descendants():
            with suppress(psutil.Error):
                environment = process.environ()
                rank = environment.get("PMI_RANK", environment.get("OMPI_COMM_WORLD_RANK"))
                if rank is not None and str(DRIVER) in process.cmdline():
                    found[int(rank)] = process
        return found

    def line(self) -> Any:
        """The next line of JSON on the job's output."""
        assert self.process.stdout
        text = self.process.stdout.readline()
        self._note_shared_memory()
        return json.loads(text or self.process.communicate()[1])

    def finish(self, timeout: float = 60) -> tuple[int, list[Any], str]:
        """Exit status, lines of JSON not read yet, and what was said on stderr."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                output, errors = self.process.communicate(timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                self._note_shared_memory()
                assert time.monotonic() < deadline, f"still running after {timeout} s"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return self.process.returncode, lines, errors

    def __enter__(self) -> "RunningJob":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._descendants(), self.process]:
            with suppress(psutil.Error, ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        for file in self._shared:  # left where ranks were killed
            file.unlink(missing_ok=True)

    def _descendants(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def _note_shared_memory(self) -> None:
        for process in self._descendants():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._shared |= set(
                    map(Path, re.findall(r"/dev/shm/(?:mpich_shm_|sm_segment\.)\S+", maps))
                )


def run_job(ranks: int, engine: Path, action: str, *options: str) -> tuple[int, list[Any], str]:
    """Run a job to its end: exit status, lines of JSON, stderr."""
    with RunningJob(ranks, engine, action, *options) as job:
        return job.finish()
