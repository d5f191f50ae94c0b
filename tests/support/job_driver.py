"""A rank of a job, without HTTP: what the tests start with mpirun.

Usage: job_driver.py ENGINE ACTION [--tp N] [--dp N] [...]. What ranks find they print, a
line of JSON each.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.distributed import job as job_module
from trtree.runtime.distributed.job import Job, JobError, open_job
from trtree.runtime.executor import (
    DecodingMode,
    ExecutorConfig,
    ExecutorLike,
    QueueFullError,
    Request,
    SpeculativeConfig,
)
from wrapped_engine import FailingEngine

PROMPTS = [[5, 17, 300, 9], [44] * 30, [1023, 0, 1], [12, 13, 14, 15, 16]]
MODES = [DecodingMode.TREE, DecodingMode.PLAIN, DecodingMode.CHAIN, DecodingMode.TREE]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", type=Path)
    parser.add_argument("action", choices=sorted(ACTIONS))
    parser.add_argument("--tp", type=int)
    parser.add_argument("--dp", type=int)
    parser.add_argument("--rank", type=int, default=1, help="who misbehaves")
    parser.add_argument("--other-engine", type=Path, help="what that rank opens instead")
    parser.add_argument("--start-timeout", type=float, default=60)
    args = parser.parse_args()
    if args.action == "late" and _launched_rank() == args.rank:
        time.sleep(60)
    if args.action == "slow" and _launched_rank() == args.rank:
        EngineDir.verify = lambda *_: time.sleep(60)  # type: ignore[assignment, method-assign]
    if args.action == "broken" and _launched_rank() == 0:
        _break_part()
    engine = args.other_engine if _launched_rank() == args.rank else None
    try:
        with open_job(
            engine or args.engine,
            tp=args.tp,
            dp=args.dp,
            executor_config=_config,
            num_threads=1,
            start_timeout=args.start_timeout,
        ) as job:
            ACTIONS[args.action](job, args)
    except (JobError, EngineDirError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def generate(job: Job, args: argparse.Namespace) -> None:
    """Every prompt on every replica; the tokens must not depend on which."""
    if job.is_leader:
        report(tokens=[_outputs(executor) for executor in job.executors], lost=job.health())
    else:
        job.work()


def idle(job: Job, args: argparse.Namespace) -> None:
    """The share of a processor that each rank takes while there are no requests."""
    used, started = time.process_time(), time.monotonic()
    if job.is_leader:
        time.sleep(2)
    else:
        job.work()
    share = (time.process_time() - used) / (time.monotonic() - started)
    report(rank=job.rank, share=share)


def serve(job: Job, args: argparse.Namespace) -> None:
    """Decode until SIGTERM, as a server does; says so when every executor has decoded."""
    if not job.is_leader:
        job.work()
        return
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    started = False
    while not stopped.is_set():
        for executor in job.executors:
            _outputs(executor)
        if not started:
            report(serving=True)
            started = True


def wait(job: Job, args: argparse.Namespace) -> None:
    """Report the lost ranks, ten times a second."""
    if not job.is_leader:
        job.work()
        return
    while True:
        report(lost=job.health())
        time.sleep(0.1)


def leave(job: Job, args: argparse.Namespace) -> None:
    """One rank leaves with status 0, as if its work were done."""
    if job.rank == args.rank:
        sys.exit(0)
    generate(job, args)
    if job.is_leader:
        time.sleep(30)


def fail(job: Job, args: argparse.Namespace) -> None:
    """An exception in a thread of one rank."""
    if job.rank == args.rank:

        def raise_error() -> None:
            raise RuntimeError("planted")

        threading.Thread(target=raise_error).start()
    if job.is_leader:
        time.sleep(30)
    else:
        job.work()


def broken(job: Job, args: argparse.Namespace) -> None:
    """Rank 0's part of the engine fails, while the others wait for its sums."""
    generate(job, args)


def _break_part() -> None:
    load = job_module.load_part
    job_module.load_part = lambda *args: FailingEngine(load(*args), "step", 3)


def unique_id(job: Job, args: argparse.Namespace) -> None:
    """What NCCL would be given on every rank."""
    from trtree.runtime.distributed.nccl import nccl_communicator  # needs torch

    class Nccl:
        @staticmethod
        def unique_id() -> bytes:
            return bytes(range(128))

        @staticmethod
        def init_rank(size: int, unique_id: bytes, rank: int) -> tuple[int, str, int]:
            return size, unique_id.hex(), rank

    assert isinstance(job, job_module.RankJob)
    report(rank=job.rank, communicator=nccl_communicator(job.replica, Nccl()))
    if not job.is_leader:
        job.work()


def executors(job: Job, args: argparse.Namespace) -> None:
    """What every executor answers besides tokens: the replicas' must not differ."""
    if job.is_leader:
        for executor in job.executors:
            report(**_manners(executor))
    else:
        job.work()


def _manners(executor: ExecutorLike) -> dict[str, object]:
    facts: dict[str, object] = {}
    started = time.monotonic()
    facts["idle"] = executor.await_responses(0.2)
    facts["waited"] = time.monotonic() - started > 0.15
    try:
        executor.enqueue_request(Request([10**6]))
    except ValueError as error:
        facts["invalid"] = str(error)
    long = Request([5] * 8, 1500, speculative=SpeculativeConfig(DecodingMode.PLAIN))
    ids = [executor.enqueue_request(long)]
    try:
        for _ in range(100):
            ids.append(executor.enqueue_request(long))
    except QueueFullError as error:
        facts["full"] = "max_queue_size is 20" in str(error)
    for request_id in reversed(ids):  # those that wait: none of them can have ended
        executor.cancel_request(request_id)
    reasons = []
    while responses := executor.await_responses():
        reasons += [r.finish_reason.name for r in responses if r.finished]
    cancelled = reasons.count("CANCELLED")
    facts["cancelled"] = cancelled > 0  # a fast engine may have ended those that ran
    facts["all_ended"] = cancelled + reasons.count("LENGTH") == len(reasons) == len(ids)
    tokens = sum(map(len, _outputs(executor)))
    rounds = executor.take_rounds()[-20:]
    facts["rounds"] = sum(record.emitted_tokens for record in rounds) > 0
    statistics = executor.latest_statistics()
    facts["tokens"] = tokens
    facts["counted"] = [
        statistics.finished_requests - reasons.count("LENGTH"),
        statistics.cancelled_requests == cancelled,
    ]
    executor.shutdown()
    try:
        executor.enqueue_request(long)
    except RuntimeError as error:
        facts["shut_down"] = str(error)
    return facts


def churn(job: Job, args: argparse.Namespace) -> None:
    """Clients come, cancel and go on every replica at once; every request ends once, with the
    tokens it has alone."""
    if not job.is_leader:
        job.work()
        return
    vocab_size = EngineDir.open(args.engine).manifest["pretrained_config"]["vocab_size"]
    threads = [
        threading.Thread(target=_churn, args=(executor, number, vocab_size))
        for number, executor in enumerate(job.executors)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _churn(executor: ExecutorLike, seed: int, vocab_size: int) -> None:
    asked: dict[int, Request] = {}
    cancelled: set[int] = set()

    def client(number: int) -> None:
        rng = random.Random(10 * seed + number)
        for _ in range(60):
            prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 40))]
            speculative = SpeculativeConfig(rng.choice(MODES), tree_budget=8)
            request = Request(prompt, rng.randrange(1, 30), speculative=speculative)
            with suppress(QueueFullError):
                request_id = executor.enqueue_request(request)
                asked[request_id] = request
                time.sleep(rng.random() / 50)
                if rng.random() < 0.3:
                    cancelled.add(request_id)
                    executor.cancel_request(request_id)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in clients:
        thread.start()
    output: dict[int, list[int]] = {}
    ended: list[int] = []
    while True:
        working = any(thread.is_alive() for thread in clients)
        responses = executor.await_responses(0.05)
        for response in responses:
            output.setdefault(response.request_id, []).extend(response.token_ids)
            ended += [response.request_id] * response.finished
        if not working and not responses:
            break
    same = True
    for request_id in sorted(set(asked) - cancelled)[:8]:
        executor.enqueue_request(asked[request_id])
        alone: list[int] = []
        while responses := executor.await_responses():
            alone += [token for response in responses for token in response.token_ids]
        same = same and alone == output[request_id]
    report(asked=len(asked), ended_once=sorted(ended) == sorted(asked), same=same)


def _config(engine: EngineDir) -> ExecutorConfig:
    return ExecutorConfig(max_queue_size=20, record_rounds=True)


def _outputs(executor: ExecutorLike) -> list[list[int]]:
    output: dict[int, list[int]] = {}
    for prompt, mode in zip(PROMPTS, MODES, strict=True):
        speculative = SpeculativeConfig(mode, tree_budget=16)
        output[executor.enqueue_request(Request(prompt, 24, speculative=speculative))] = []
    while responses := executor.await_responses():
        for response in responses:
            output[response.request_id] += response.token_ids
    return list(output.values())


def report(**facts: object) -> None:
    # One write: lines of several ranks must not mix.
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _launched_rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


ACTIONS = {
    "broken": broken,
    "churn": churn,
    "unique_id": unique_id,
    "executors": executors,
    "fail": fail,
    "generate": generate,
    "idle": idle,
    "late": generate,
    "leave": leave,
    "serve": serve,
    "slow": generate,
    "wait": wait,
}

if __name__ == "__main__":
    sys.exit(main())
