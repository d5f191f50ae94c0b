"""Generation for servers: text in, text out, for many callers over one or several executors.

Knows nothing of HTTP or MPI. A thread per executor runs its rounds; one more turns tokens
into text and calls back, so that text never keeps an engine waiting.
"""

import hashlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from trtree.build.engine_dir import EngineDir
from trtree.runtime.executor import (
    BudgetPolicy,
    DecodingMode,
    ExecutorLike,
    ExecutorStatistics,
    QueueFullError,
    Response,
    RoundRecord,
    SpeculativeConfig,
    TreeKind,
)
from trtree.runtime.generation import (
    Chunk,
    Finish,
    Finished,
    Generation,
    OnChunk,
    Submission,
    TokenText,
    Usage,
)
from trtree.runtime.session import RequestError
from trtree.runtime.tokenizer import Tokenizer

__all__ = [
    "Chunk",
    "Finish",
    "Finished",
    "Handle",
    "Service",
    "ServiceUnavailableError",
    "Submission",
    "TokenText",
    "Usage",
    "choice_seeds",
]

IDLE_SECONDS = 0.2  # how long an executor without requests waits before it looks up
_log = logging.getLogger(__name__)


class RoundLog(Protocol):
    """Takes what executors record; see ``runtime/trace.py``."""

    def write(self, executor: int, rounds: Sequence[RoundRecord]) -> None: ...


class ServiceUnavailableError(RuntimeError):
    """The service takes no requests: it is draining, or its engine failed."""


class Handle:
    """What a caller keeps of a submission."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """End it soon; its last chunk says so. Does not wait, and after its end does nothing."""
        self._cancel()


@dataclass(frozen=True)
class _News:
    """From an executor's thread to the text thread."""

    lane: "_Lane"
    responses: list[Response]
    rounds: list[RoundRecord]
    failure: str | None = None


@dataclass(frozen=True)
class _Cancellation:
    """From any thread to the text thread: another process's executor takes a while to tell."""

    lane: "_Lane"
    request_id: int | None  # None: all


class _Lane:
    """One executor and the requests it holds."""

    def __init__(self, index: int, executor: ExecutorLike) -> None:
        self.index = index
        self.executor = executor
        self.failure: str | None = None
        self._generations: dict[int, Generation] = {}
        # Held while a request is queued, so that no response is seen before its request.
        self._lock = threading.Lock()

    @property
    def load(self) -> int:
        return len(self._generations)

    def submit(self, generation: Generation) -> int:
        with self._lock:
            if self.failure is not None:
                raise ServiceUnavailableError(self.failure)
            request_id = self.executor.enqueue_request(generation.submission.request)
            self._generations[request_id] = generation
        return request_id

    def cancel(self, request_id: int | None) -> None:
        """One request if it is still there, or all."""
        with self._lock:
            known = list(self._generations) if request_id is None else [request_id]
            live = [one for one in known if one in self._generations and self.failure is None]
        for one in live:
            with suppress(RuntimeError):  # a shut down executor has ended it
                self.executor.cancel_request(one)

    def find(self, request_id: int) -> Generation | None:
        with self._lock:
            return self._generations.get(request_id)

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._generations.pop(request_id, None)

    def fail(self, failure: str) -> None:
        with self._lock:
            self.failure = failure

    def take_all(self) -> list[Generation]:
        with self._lock:
            generations = list(self._generations.values())
            self._generations.clear()
        return generations


class Service:
    """Text generation with an engine directory's tokenizer over its executors.

    Any thread may call any method; chunks are handed over in a thread of the service.
    """

    def __init__(
        self,
        engine_dir: EngineDir,
        executors: Sequence[ExecutorLike],
        *,
        round_log: RoundLog | None = None,
    ) -> None:
        """round_log: takes the executors' rounds; they must be configured to record them."""
        self.engine_dir = engine_dir
        self.tokenizer = Tokenizer(engine_dir.tokenizer_path)
        self._generation_config = engine_dir.generation_config()
        self.observers: list[Callable[[Finished], None]] = []
        self._round_log = round_log
        self._draining = False
        self._closing = threading.Event()
        self._news: queue.SimpleQueue[_News | _Cancellation | None] = queue.SimpleQueue()
        self._lanes = [_Lane(i, executor) for i, executor in enumerate(executors)]
        self._loops = [
            threading.Thread(target=self._run_lane, args=(lane,), name=f"executor{lane.index}")
            for lane in self._lanes
        ]
        self._text = threading.Thread(target=self._run_text, name="text")
        for thread in (*self._loops, self._text):
            thread.daemon = True  # a process that fails elsewhere must not hang here
            thread.start()

    # What callers need to make a request

    @property
    def max_seq_len(self) -> int:
        return int(self.engine_dir.manifest["build_config"]["max_seq_len"])

    @property
    def stop_token_ids(self) -> list[int]:
        """The checkpoint's own end-of-text ids."""
        eos = self._generation_config.get("eos_token_id")
        if eos is None:
            return []
        return list(eos) if isinstance(eos, list) else [eos]

    def sampling_defaults(self) -> dict[str, float]:
        """The checkpoint's own sampling, as generation_config.json means it: greedy unless
        it says do_sample."""
        config = self._generation_config
        if not config.get("do_sample"):
            return {"temperature": 0.0}
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {"temperature": 1.0} | {n: config[n] for n in names if config.get(n) is not None}

    def speculative_config(
        self,
        mode: str | None = None,
        tree_budget: int | None = None,
        tree: str | None = None,
        policy: str | None = None,
        chain_seed: bool = False,
        top_k: int = 0,
    ) -> SpeculativeConfig:
        """By names; what is None is as the engine was built, plain without a drafter."""
        built = self.engine_dir.manifest["speculative_config"]
        mode = mode or ("tree" if built else "plain")
        built = built or {}
        return SpeculativeConfig(
            DecodingMode[mode.upper()],
            TreeKind[(tree or built.get("tree", "dynamic")).upper()],
            built.get("tree_budget", 0) if tree_budget is None else tree_budget,
            top_k,
            BudgetPolicy[(policy or "fixed").upper()],
            chain_seed,
        )

    # Requests

    def submit(self, submission: Submission, on_chunk: OnChunk) -> Handle:
        """Queue one output; ``on_chunk`` is called until a chunk has ``finish``.

        Raises:
            RequestError: the engine cannot serve it; names the parameter and both values.
            QueueFullError: as many requests wait as may.
            ServiceUnavailableError: draining, or the engine failed.
        """
        if self._draining:
            raise ServiceUnavailableError("the server is shutting down")
        if self.failure is not None:
            raise ServiceUnavailableError(self.failure)
        generation = Generation(submission, self.tokenizer, on_chunk)
        full: QueueFullError | None = None
        for lane in sorted(self._lanes, key=lambda lane: lane.load):
            try:
                request_id = lane.submit(generation)
                return Handle(partial(self._news.put, _Cancellation(lane, request_id)))
            except QueueFullError as error:
                full = full or error
            except ValueError as error:
                raise RequestError(str(error)) from None
            except RuntimeError as error:  # shut down meanwhile
                raise ServiceUnavailableError(str(error)) from None
        assert full is not None
        raise full

    @property
    def open_requests(self) -> int:
        return sum(lane.load for lane in self._lanes)

    def statistics(self) -> dict[int, ExecutorStatistics]:
        """Of each executor that works, by its index."""
        working = [lane for lane in self._lanes if lane.failure is None]
        return {lane.index: lane.executor.latest_statistics() for lane in working}

    # Life

    @property
    def failure(self) -> str | None:
        """Why an engine stopped working, if one did."""
        return next((lane.failure for lane in self._lanes if lane.failure is not None), None)

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Take no more requests; those there are go on."""
        self._draining = True

    def cancel_all(self) -> None:
        """End all requests; their last chunks say so."""
        for lane in self._lanes:
            self._news.put(_Cancellation(lane, None))

    def close(self, timeout_seconds: float = 10.0) -> None:
        """End all requests and the threads."""
        self.drain()
        self._closing.set()
        for lane in self._lanes:
            if lane.failure is None:
                lane.executor.shutdown()
        for loop in self._loops:
            loop.join(timeout_seconds)
        self._news.put(None)
        self._text.join(timeout_seconds)

    def _run_lane(self, lane: _Lane) -> None:
        """An executor's rounds, until it is shut down or fails."""
        record = self._round_log is not None
        try:
            while True:
                responses = lane.executor.await_responses(IDLE_SECONDS)
                if responses:
                    rounds = lane.executor.take_rounds() if record else []
                    self._news.put(_News(lane, responses, rounds))
                elif self._closing.is_set():
                    return
        except Exception as error:  # whatever an engine raises ends its requests, not the process
            _log.exception("executor %d failed", lane.index)
            failure = f"the engine failed: {error}"
            lane.fail(failure)
            self._news.put(_News(lane, [], [], failure))

    def _run_text(self) -> None:
        while (news := self._news.get()) is not None:
            if isinstance(news, _Cancellation):
                news.lane.cancel(news.request_id)
                continue
            self._log_rounds(news)
            for response in news.responses:
                self._respond(news.lane, response)
            if news.failure is not None:
                for generation in news.lane.take_all():
                    self._observe(generation, partial(generation.fail, news.failure))

    def _log_rounds(self, news: _News) -> None:
        if self._round_log is None or not news.rounds:
            return
        try:
            self._round_log.write(news.lane.index, news.rounds)
        except OSError as error:  # a full disk must not end the requests
            _log.error("the trace ends here: %s", error)
            self._round_log = None

    def _respond(self, lane: _Lane, response: Response) -> None:
        generation = lane.find(response.request_id)
        if generation is None:
            return  # it ended with a stop string
        finished = self._observe(generation, partial(generation.on_response, response))
        if finished:
            if not response.finished:
                lane.cancel(response.request_id)
            lane.forget(response.request_id)

    def _observe(self, generation: Generation, step: Callable[[], Finished | None]) -> bool:
        """Whether the request has ended. A caller that cannot take its chunks ends it too."""
        try:
            finished = step()
        except Exception:  # one caller must not end the others
            _log.exception("a request's output could not be passed on")
            try:  # if it was the output that failed, and not the caller, that one waits
                finished = generation.fail("the output could not be written as text")
            except Exception:
                return True
        if finished is not None:
            for observer in self.observers:
                observer(finished)
        return finished is not None


def choice_seeds(seed: int | None, count: int) -> list[int]:
    """Seeds of a request's choices: its own (or a random one), then independent ones by index."""
    first = secrets.randbits(64) if seed is None else seed
    return [first] + [
        int.from_bytes(hashlib.blake2b(b"%d,%d" % (first, i), digest_size=8).digest(), "little")
        for i in range(1, count)
    ]
