"""Loading and unloading leaves nothing: no process, no shared memory, no growth."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engines import DEMO_PROMPTS
from tritonserver import TritonServer, within
from trtree.runtime.triton_repo.repository import write_repository
from trtree.runtime.triton_repo.settings import EngineSettings

Expected = Callable[..., str]
PROMPT = DEMO_PROMPTS[0]


def shared_memory(server: TritonServer) -> set[Path]:
    """What the server and its processes have mapped of it."""
    found: set[Path] = set()
    for process in (psutil.Process(server.process.pid), *server.processes()):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= set(map(Path, re.findall(r"/dev/shm/\S+", maps)))
    return found


def alive(process: psutil.Process) -> bool:
    """Not ended; one that nobody has waited for yet has."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def cycle(server: TritonServer, text: str) -> None:
    """Load, answer while a client leaves, unload: nothing may be left."""
    before = {process.pid for process in server.processes()}
    server.load()
    processes = [p for p in server.processes() if p.pid not in before]
    mapped = shared_memory(server)
    assert processes and mapped
    assert server.generate(text_input=PROMPT, max_tokens=24)["text_output"] == text
    server.unload()
    assert within(30, lambda: not any(map(alive, processes)))
    left = [file for file in mapped if file.exists()]
    other = shared_memory(server)  # of models that stay
    assert not set(left) - other


def test_two_ranks_come_and_go(single_server: TritonServer, expected: Expected) -> None:
    """In its process, mpirun and both ranks."""
    single_server.unload()
    for _ in range(2):
        cycle(single_server, expected(PROMPT, 24))
    single_server.load()


def test_a_server_that_is_killed_takes_its_models_along(
    demo_engine: Callable[..., Path], triton_environment: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    write_repository(demo_engine(tp=2), repository, settings=EngineSettings(threads=1))
    server = TritonServer(triton_environment, repository, tmp_path / "log")
    events = server.events(text_input=PROMPT, max_tokens=1500, streaming=True)
    next(events)
    processes, mapped = server.processes(), shared_memory(server)
    assert len(processes) >= 4  # the model, mpirun, two ranks
    server.process.kill()
    server.process.wait()
    try:
        assert within(60, lambda: not any(map(alive, processes)))
        left = {file for file in mapped if file.exists()}
        assert not any(file.name.startswith("mpich") for file in left)
    finally:
        for process in processes:
            if alive(process):
                process.kill()
        for file in mapped:  # nobody is left who could
            file.unlink(missing_ok=True)


def test_a_job_that_runs_already(
    single_server: TritonServer,
    demo_engine: Callable[..., Path],
    expected: Expected,
    tmp_path: Path,
) -> None:
    """A load is refused before it runs; the job outlives the model."""
    path = tmp_path / "socket"
    write_repository(
        demo_engine(tp=2), tmp_path / "models", settings=EngineSettings(job_socket=str(path))
    )
    target = single_server.repository / "trtree"
    kept = target.with_name(".kept")
    single_server.unload()
    target.rename(kept)
    shutil.copytree(tmp_path / "models" / "trtree", target)
    job = None
    try:
        refused = single_server.http.post("/v2/repository/models/trtree/load", json={})
        assert f"job_socket {path}: no job answers there" in refused.json()["error"]
        launcher = Path(sys.executable).with_name("mpirun")
        command = [launcher, "-n", "2", sys.executable, "-m", "trtree.runtime.triton_repo.job"]
        job = subprocess.Popen([*command, "--engine", demo_engine(tp=2), "--socket", path])
        assert within(60, path.exists)
        assert path.stat().st_mode & 0o077 == 0
        for _ in range(2):
            single_server.load()
            answer = single_server.generate(text_input=PROMPT, max_tokens=24)
            assert answer["text_output"] == expected(PROMPT, 24)
            single_server.unload()
            assert job.poll() is None
    finally:
        if job is not None:
            job.terminate()
            job.wait(30)
        shutil.rmtree(target)
        kept.rename(target)
        single_server.load()


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_twenty_cycles(
    demo_engine: Callable[..., Path],
    triton_environment: Path,
    tmp_path: Path,
    expected: Expected,
    tp: int,
) -> None:
    repository = tmp_path / "models"
    write_repository(demo_engine(tp=tp), repository, settings=EngineSettings(threads=1))
    with TritonServer(triton_environment, repository, tmp_path / "log", models=[]) as server:
        process = psutil.Process(server.process.pid)
        sizes = []
        for _ in range(20):
            cycle(server, expected(PROMPT, 24))
            time.sleep(0.2)
            sizes.append(process.memory_info().rss)
        assert not server.processes()
        # What the first cycles load stays; then there is no more.
        assert max(sizes[15:]) - max(sizes[5:10]) < 2 << 20
