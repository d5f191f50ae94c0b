"""Jobs under a real mpirun: what they compute, how they start, and how they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from job_driver import PROMPTS
from mpi_jobs import DRIVER, RunningJob, run_job

Build = Callable[..., Path]


def test_text_is_the_same_on_any_ranks(demo_engine: Build) -> None:
    alone = subprocess.run(
        [sys.executable, DRIVER, demo_engine(tp=1), "generate"], capture_output=True, text=True
    )
    expected = alone.stdout
    assert alone.returncode == 0, alone.stderr
    for ranks, tp, replicas in ((1, 1, 1), (2, 2, 1), (4, 2, 2), (2, 1, 2)):
        status, lines, errors = run_job(ranks, demo_engine(tp=tp), "generate")
        assert status == 0, errors
        (line,) = lines
        assert line["lost"] == []
        assert len(line["tokens"]) == replicas
        for tokens in line["tokens"]:
            assert f'{{"tokens": [{tokens}], "lost": []}}\n' == expected


def test_another_replicas_executor_behaves_as_one_in_this_process(demo_engine: Build) -> None:
    status, lines, errors = run_job(2, demo_engine(tp=1), "executors")
    assert status == 0, errors
    here, there = lines
    assert here == there
    assert here["idle"] == [] and here["waited"] and here["all_ended"] and here["rounds"]
    assert "1000000" in here["invalid"]
    assert here["full"]
    assert here["cancelled"]
    assert here["counted"] == [len(PROMPTS), True]
    assert "shut down" in here["shut_down"]


def test_clients_that_come_and_go_on_all_replicas(demo_engine: Build) -> None:
    status, lines, errors = run_job(4, demo_engine(tp=2), "churn")
    assert status == 0, errors
    assert len(lines) == 2
    for line in lines:
        assert line["asked"] > 0 and line["ended_once"] and line["same"]


@pytest.mark.parametrize(
    ("ranks", "tp", "options", "named"),
    [
        (3, 2, (), "mpirun started 3 ranks; tp 2 x dp 1 are 2: run mpirun -n 2"),
        (1, 2, (), "mpirun started 1 ranks; tp 2 x dp 1 are 2: run mpirun -n 2"),
        (2, 2, ("--dp", "2"), "mpirun started 2 ranks; tp 2 x dp 2 are 4: run mpirun -n 4"),
        (2, 2, ("--tp", "1"), "built for 2 tensor-parallel ranks, --tp asks for 1"),
    ],
)
def test_a_world_that_does_not_fit_is_refused(
    demo_engine: Build, ranks: int, tp: int, options: tuple[str, ...], named: str
) -> None:
    status, _, errors = run_job(ranks, demo_engine(tp=tp), "generate", *options)
    assert status == 2
    assert errors.count("error:") == 1  # rank 0 speaks for all
    assert named in errors


def test_a_rank_that_cannot_load_is_named(demo_engine: Build, tmp_path: Path) -> None:
    damaged = tmp_path / "engine"
    subprocess.run(["cp", "-r", demo_engine(tp=2), damaged], check=True)
    weights = damaged / "target.rank1.bin"
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    weights.write_bytes(data)
    status, _, errors = run_job(2, damaged, "generate")
    assert status == 2
    assert "error: rank 1 on " in errors
    assert "target.rank1.bin: SHA-256" in errors


def test_ranks_with_different_engines_do_not_start(demo_engine: Build) -> None:
    other = demo_engine(tp=2, max_batch_size=4)
    status, _, errors = run_job(2, demo_engine(tp=2), "generate", "--other-engine", str(other))
    assert status == 2
    assert "give all ranks the same engine" in errors


@pytest.mark.parametrize(
    ("action", "seconds", "named"),
    [
        ("late", 2, "not all ranks have joined MPI after 2 s"),
        # A busy machine's ranks may be two seconds apart when they join.
        ("slow", 5, "after 5 s, loading the weights is still not done on rank 1"),
    ],
)
def test_a_hang_at_the_start_ends_the_job(
    demo_engine: Build, action: str, seconds: int, named: str
) -> None:
    status, _, errors = run_job(2, demo_engine(tp=2), action, "--start-timeout", str(seconds))
    assert status != 0
    assert named in errors


def test_idle_ranks_sleep(demo_engine: Build) -> None:
    status, lines, errors = run_job(4, demo_engine(tp=2), "idle")
    assert status == 0, errors
    assert sorted(line["rank"] for line in lines) == [0, 1, 2, 3]
    assert max(line["share"] for line in lines) < 0.1


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_killing_any_rank_ends_the_job(demo_engine: Build, victim: int) -> None:
    with RunningJob(4, demo_engine(tp=2), "serve") as job:
        assert job.line() == {"serving": True}
        ranks = job.ranks()
        ranks[victim].kill()
        status, _, _ = job.finish()
        assert status != 0
        psutil.wait_procs(ranks.values(), timeout=60)
        assert [rank for rank, process in ranks.items() if _runs(process)] == []


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def test_leaving_early_is_noticed(demo_engine: Build) -> None:
    status, _, errors = run_job(2, demo_engine(tp=2), "leave")
    assert status != 0
    assert "rank 1" in errors and "leaves while the others work" in errors


def test_an_exception_in_a_thread_ends_the_job(demo_engine: Build) -> None:
    status, _, errors = run_job(2, demo_engine(tp=2), "fail")
    assert status != 0
    assert "RuntimeError: planted" in errors and "ending the job" in errors


def test_a_failed_engine_on_rank_0_ends_the_job(demo_engine: Build) -> None:
    """The others wait for its part of a step, and would do so for ever."""
    status, _, errors = run_job(2, demo_engine(tp=2), "broken")
    assert status != 0
    assert "its engine failed" in errors


def test_nccls_unique_id_reaches_every_rank(demo_engine: Build) -> None:
    """All of the TensorRT ranks' start that needs no GPU."""
    status, lines, errors = run_job(2, demo_engine(tp=2), "unique_id")
    assert status == 0, errors
    sent = bytes(range(128)).hex()
    assert sorted(line["communicator"] for line in lines) == [[2, sent, 0], [2, sent, 1]]


def test_sigterm_reaches_rank_0_alone(demo_engine: Build) -> None:
    """mpirun hands it to every rank; the others go on until rank 0 lets them go."""
    with RunningJob(4, demo_engine(tp=2), "serve") as job:
        assert job.line() == {"serving": True}
        for process in job.ranks().values():
            process.send_signal(signal.SIGTERM)
        status, _, errors = job.finish()
        assert status == 0, errors


def test_a_silent_rank_is_reported(demo_engine: Build) -> None:
    with RunningJob(2, demo_engine(tp=2), "wait") as job:
        assert job.line() == {"lost": []}
        process = job.ranks()[1]
        process.suspend()
        deadline = time.monotonic() + 60
        while job.line() == {"lost": []}:
            assert time.monotonic() < deadline
        assert job.line() == {"lost": [1]}
        process.resume()
        while job.line() == {"lost": [1]}:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ("", "mpirun started 2 ranks, mpi4py sees 1: its MPI is not the launcher's"),
        ("sys.modules['mpi4py'] = None", "mpi4py cannot be used"),
    ],
)
def test_a_launcher_that_is_not_mpi4pys_is_named(
    demo_engine: Build, before: str, named: str
) -> None:
    """As where one MPI's mpirun starts ranks whose mpi4py belongs to another, or is missing."""
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(DRIVER.parent)!r}); {before}\n"
        f"sys.argv[1:] = [{str(demo_engine(tp=2))!r}, 'generate']\n"
        f"runpy.run_path({str(DRIVER)!r}, run_name='__main__')"
    )
    refused = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"OMPI_COMM_WORLD_SIZE": "2"},
    )
    assert refused.returncode == 2
    assert named in refused.stderr


def test_without_a_launcher_one_process_does(demo_engine: Build) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI"))}
    refused = subprocess.run(
        [sys.executable, DRIVER, demo_engine(tp=2), "generate"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert refused.returncode == 2
    assert "run mpirun -n 2" in refused.stderr
