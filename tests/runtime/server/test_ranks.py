"""``mpirun -n N runtime/serve.py``: one server over tensor-parallel ranks and replicas."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import psutil
import pytest

from engines import DEMO_PROMPTS
from mpi_jobs import LAUNCHER_ENVIRONMENT, mpirun
from server import ROOT, ServerProcess

PROMPT = DEMO_PROMPTS[0]
Build = Callable[..., Path]


@contextmanager
def ranks(count: int, engine: Path, *arguments: object) -> Iterator[ServerProcess]:
    """A server on ``count`` ranks; no process and no shared memory is left behind."""
    server = ServerProcess(
        engine, *arguments, launcher=(mpirun(), "-n", str(count)), environment=LAUNCHER_ENVIRONMENT
    )
    workers = rank_processes(server)
    shared = {
        Path(name)
        for process in workers.values()
        for name in re.findall(
            r"/dev/shm/mpich_shm_\S+", Path(f"/proc/{process.pid}/maps").read_text()
        )
    }
    try:
        yield server
    finally:
        for process in workers.values():
            with suppress(psutil.Error):
                process.kill()
        server.close()
        for file in shared:  # MPICH leaves it where ranks were killed
            file.unlink(missing_ok=True)


def rank_processes(server: ServerProcess) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            environment = process.environ()
            rank = environment.get("PMI_RANK", environment.get("OMPI_COMM_WORLD_RANK"))
            if rank is not None and any("serve.py" in part for part in process.cmdline()):
                found[int(rank)] = process
    return found


def streamed(server: ServerProcess) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=40, temperature=0, stream=True
    )
    chunks = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(chunks) > 2
    return "".join(chunks)


def test_every_layout_streams_the_same_text(demo_engine: Build) -> None:
    """Each of them is asked twice, so that both replicas of the last answer."""
    texts = []
    for count, tp in ((1, 1), (2, 2), (4, 2)):
        with ranks(count, demo_engine(tp=tp)) as server:
            assert server.http.get("/health").json() == {"status": "ok", "ranks": count}
            texts += [streamed(server), streamed(server)]
            processes = rank_processes(server)
            assert sorted(processes) == list(range(count))
            # Pitfall 39: rank 0 alone opens a port.
            port = int(server.url.rsplit(":", 1)[1])
            listening = [
                rank
                for rank, process in processes.items()
                if any(c.laddr and c.laddr.port == port for c in process.net_connections())
            ]
            assert listening == [0]
            assert server.stop() == 0
    assert texts == [texts[0]] * 6


def test_sigterm_lets_open_streams_end(demo_engine: Build) -> None:
    with ranks(4, demo_engine(tp=2), "--drain-seconds", 60) as server:
        body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if line)
            os.kill(server.process.pid, signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(first.removeprefix("data: "))["choices"]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(rest)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_ends_the_job(demo_engine: Build, victim: int) -> None:
    """Pitfall 38. Rank 3 is the second of the second replica."""
    with ranks(4, demo_engine(tp=2)) as server:
        rank_processes(server)[victim].kill()
        assert server.process.wait(60) != 0


def test_ranks_that_do_not_fit_are_refused(demo_engine: Build) -> None:
    """Pitfall 40."""
    for arguments, named in (
        ((), "mpirun started 3 ranks; tp 2 x dp 1 are 2: run mpirun -n 2"),
        (("--tp", "4"), "built for 2 tensor-parallel ranks, --tp asks for 4"),
    ):
        done = subprocess.run(
            [
                *(mpirun(), "-n", "3", sys.executable, str(ROOT / "runtime" / "serve.py")),
                *("--engine", str(demo_engine(tp=2)), "--port", "0", *arguments),
            ],
            capture_output=True,
            text=True,
            env=os.environ | LAUNCHER_ENVIRONMENT,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.count("error:") == 1 and named in done.stderr


def test_the_script_itself_is_executable() -> None:
    """``mpirun -n 2 runtime/serve.py``, with the environment's bin folder on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert shutil.which(str(ROOT / "runtime" / "serve.py"))
    done = subprocess.run(
        [mpirun(), "-n", "2", str(ROOT / "runtime" / "serve.py"), "--help"],
        capture_output=True,
        text=True,
        env=os.environ | LAUNCHER_ENVIRONMENT | {"PATH": path},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "--engine DIR" in done.stdout
