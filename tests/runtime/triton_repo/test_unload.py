"""Loading and unloading leaves nothing: no process, no shared memory, no growth."""

import re
import time
from collections.abc import Callable
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


def cycle(server: TritonServer, text: str) -> None:
    """Load, answer while a client leaves, unload: nothing may be left."""
    before = {process.pid for process in server.processes()}
    server.load()
    processes = [p for p in server.processes() if p.pid not in before]
    mapped = shared_memory(server)
    assert processes and mapped
    assert server.generate(text_input=PROMPT, max_tokens=24)["text_output"] == text
    server.unload()
    assert within(15, lambda: not any(p.is_running() for p in processes))
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
        assert within(20, lambda: not any(p.is_running() for p in processes))
        left = {file for file in mapped if file.exists()}
        assert not any(file.name.startswith("mpich") for file in left)
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
        for file in mapped:  # nobody is left who could
            file.unlink(missing_ok=True)


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
