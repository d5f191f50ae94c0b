"""Where a model's engine runs: in the model's own process, or in a job of several ranks."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.engines import load_engine
from trtree.runtime.executor import Executor, ExecutorLike
from trtree.runtime.triton_repo.remote_job import JobClient
from trtree.runtime.triton_repo.settings import EngineSettings

_END_SECONDS = 20  # for a job whose client has gone
# What launchers set for their ranks: a job started below another must not join that one.
_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "HYDRA_", "SLURM_PROCID")


@contextmanager
def hosted(
    engine: Path, settings: EngineSettings
) -> Iterator[tuple[EngineDir, list[ExecutorLike]]]:
    """An engine's executors, until the block ends.

    Raises:
        EngineDirError: no engine there, or it cannot be loaded.
        RuntimeError: its job did not come up.
    """
    engine_dir = EngineDir.open(engine, verify=False)
    if settings.job_socket:
        try:
            connection = Client(settings.job_socket, "AF_UNIX")
        except OSError as error:
            raise RuntimeError(
                f"job_socket {settings.job_socket}: no job answers there ({error.strerror}); start "
                "it first: mpirun -n RANKS python -m trtree.runtime.triton_repo.job"
            ) from None
        with _job_client(connection) as executors:
            yield engine_dir, executors
    elif (ranks := int(engine_dir.manifest["mapping"]["world_size"])) > 1:
        with _started_job(engine_dir, ranks, settings) as executors:
            yield engine_dir, executors
    else:
        engine_dir.verify()
        try:
            loaded = load_engine(engine_dir, num_threads=settings.threads)
            executor = Executor(loaded, settings.executor_config(engine_dir))
        except EngineDirError:
            raise
        except (RuntimeError, MemoryError, ValueError) as error:
            reason = str(error) or "out of memory"
            raise EngineDirError(f"{engine}: the engine cannot be loaded: {reason}") from None
        yield engine_dir, [executor]


@contextmanager
def _started_job(
    engine_dir: EngineDir, ranks: int, settings: EngineSettings
) -> Iterator[list[ExecutorLike]]:
    """A job of its own, which ends with the block, or with this process."""
    launcher = shutil.which(settings.mpirun)
    if launcher is None:
        raise RuntimeError(
            f"{engine_dir.path} has {ranks} ranks, and the launcher {settings.mpirun!r} is not on "
            "PATH; install an MPI, or name one in the parameter mpirun"
        )
    with tempfile.TemporaryDirectory(prefix="trtree-") as folder:
        path = str(Path(folder) / "job")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(1)
            process = subprocess.Popen(
                [
                    *(launcher, "-n", str(ranks), _python()),
                    *("-m", "trtree.runtime.triton_repo.job"),
                    *("--engine", str(engine_dir.path), "--connect", path),
                    *("--settings", json.dumps(settings.to_json_dict())),
                ],
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)},
            )
            try:
                connection = _accept(server, process, settings.start_seconds)
                with _job_client(connection) as executors:
                    yield executors
                process.wait(_END_SECONDS)
            finally:
                _end(process)


def _accept(
    server: socket.socket, process: "subprocess.Popen[bytes]", seconds: float
) -> Connection:
    """The job's rank 0, once it has loaded the engine."""
    server.settimeout(0.2)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            accepted, _ = server.accept()
            accepted.setblocking(True)
            return Connection(accepted.detach())
        if process.poll() is not None:
            raise RuntimeError(
                f"the engine's job ended with status {process.returncode} before it was ready; "
                "the log says why"
            )
    raise RuntimeError(f"the engine's job was not ready within {seconds} s (start_seconds)")


@contextmanager
def _job_client(connection: Connection) -> Iterator[list[ExecutorLike]]:
    client = JobClient(connection)
    try:
        yield list(client.executors)
    finally:
        client.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """A launcher passes SIGTERM on to its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _python() -> str:
    """This environment's interpreter: in Triton's process ``sys.executable`` is a stub."""
    return shutil.which("python3") or sys.executable
