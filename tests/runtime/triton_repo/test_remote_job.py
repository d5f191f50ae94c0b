"""A job's executors over a connection behave as one in this process."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines import load_engine
from trtree.runtime.executor import (
    Executor,
    ExecutorConfig,
    FinishReason,
    QueueFullError,
    Request,
    SpeculativeConfig,
    executor_config,
)
from trtree.runtime.triton_repo.remote_job import JobClient, RemoteExecutor, serve
from wrapped_engine import GatedEngine

PROMPT = [5, 17, 300, 9]
LONG = Request(PROMPT, 1500)


class OpeningExecutor(Executor):
    """Its engine stands still before its second step, until a request is cancelled: by then the
    request runs, and cannot have ended."""

    def __init__(self, engine: GatedEngine, config: ExecutorConfig) -> None:
        super().__init__(engine, config)
        self.engine = engine

    def cancel_request(self, request_id: int) -> None:
        super().cancel_request(request_id)
        self.engine.open()


class Job:
    """Rank 0's side in a thread; a client may come again."""

    def __init__(self, executor: OpeningExecutor) -> None:
        self.executor = executor
        self.connect()

    def connect(self) -> None:
        here, there = Pipe()
        self.connection = here
        self.thread = threading.Thread(target=serve, args=(there, [self.executor]))
        self.thread.start()
        self.client = JobClient(here)
        (self.remote,) = self.client.executors

    def used_pages(self) -> int:
        statistics = self.executor.latest_statistics()
        return statistics.total_pages - statistics.free_pages - statistics.cached_pages


@pytest.fixture
def job(demo_engine: Callable[..., Path]) -> Iterator[Job]:
    engine_dir = EngineDir.open(demo_engine())
    config = executor_config(engine_dir)
    config.max_queue_size = 4
    engine = GatedEngine(load_engine(engine_dir, num_threads=1), steps=1)
    one = Job(OpeningExecutor(engine, config))
    yield one
    engine.open()
    one.client.close()
    one.thread.join(60)
    assert not one.thread.is_alive()


def tokens_of(executor: Executor | RemoteExecutor, request: Request) -> list[int]:
    request_id = executor.enqueue_request(request)
    tokens: list[int] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for response in executor.await_responses(0.2):
            assert response.request_id == request_id
            tokens += response.token_ids
            if response.finished:
                return tokens
    raise AssertionError("no answer")


def test_tokens_and_statistics(job: Job, demo_engine: Callable[..., Path]) -> None:
    job.executor.engine.open()
    alone = Executor(load_engine(EngineDir.open(demo_engine()), num_threads=1))
    for config in (SpeculativeConfig(), SpeculativeConfig(tree_budget=3)):
        request = Request(PROMPT, 30, speculative=config)
        assert tokens_of(job.remote, request) == tokens_of(alone, request)
    assert job.remote.latest_statistics().output_tokens == 60
    assert job.remote.await_responses(0.01) == []


def test_errors_are_the_executors_own(job: Job) -> None:
    with pytest.raises(ValueError, match="holds 1000000; the vocabulary has"):
        job.remote.enqueue_request(Request([1000000], 4))
    with pytest.raises(QueueFullError):
        for _ in range(100):
            job.remote.enqueue_request(LONG)


def test_a_cancelled_request_says_so(job: Job) -> None:
    request_id = job.remote.enqueue_request(LONG)
    assert job.remote.await_responses(60)
    job.remote.cancel_request(request_id)
    responses = []
    while not responses or not responses[-1].finished:
        responses += job.remote.await_responses(60)
    assert responses[-1].finish_reason == FinishReason.CANCELLED


@pytest.mark.parametrize("politely", [True, False])
def test_a_clients_requests_end_with_it(job: Job, politely: bool) -> None:
    """The executor stays, for the next."""
    job.remote.enqueue_request(LONG)
    assert job.remote.await_responses(60)
    assert job.used_pages() > 0
    if politely:
        job.client.close()
    else:
        with socket.socket(fileno=os.dup(job.connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
    job.thread.join(60)
    assert not job.thread.is_alive()
    assert job.used_pages() == 0
    job.connect()
    assert len(tokens_of(job.remote, Request(PROMPT, 9))) == 9


def test_a_job_that_ends_is_an_error(job: Job) -> None:
    here, there = Pipe()
    there.close()
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        JobClient(here)
    here, there = Pipe()
    there.send(1)
    client = JobClient(here)
    (remote,) = client.executors
    there.close()
    with pytest.raises(RuntimeError, match="job has ended"):
        remote.await_responses(60)
    with pytest.raises(RuntimeError, match="job has ended"):
        remote.enqueue_request(LONG)
    client.close()
