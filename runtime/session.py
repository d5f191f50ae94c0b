"""Decoding in this process: an engine, an executor and a tokenizer, without a server."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines import load_engine
from trtree.runtime.executor import (
    BudgetPolicy,
    DecodingMode,
    Executor,
    FinishReason,
    Request,
    RequestStatistics,
    SpeculativeConfig,
    TreeKind,
    executor_config,
)
from trtree.runtime.tokenizer import Tokenizer


class RequestError(ValueError):
    """A request the engine cannot serve; names the parameter and both values."""


@dataclass(frozen=True)
class Completion:
    """One finished request: new tokens, why it ended, its counts and wall time in seconds."""

    token_ids: list[int]
    finish_reason: FinishReason
    statistics: RequestStatistics
    seconds: float


class Session:
    """An engine directory, loaded for use in this process.

    ``num_threads`` of the CPU engine; default: the processors this process may use.

    Raises:
        EngineDirError: the directory is no engine, or not as its manifest says.
    """

    def __init__(self, directory: Path, *, num_threads: int | None = None) -> None:
        self.engine_dir = EngineDir.open(directory)
        self.tokenizer = Tokenizer(self.engine_dir.tokenizer_path)
        self.engine: _core.Engine = load_engine(self.engine_dir, num_threads=num_threads)
        self.executor = Executor(self.engine, executor_config(self.engine_dir, num_threads))

    @property
    def stop_token_ids(self) -> list[int]:
        """The checkpoint's own end-of-text ids."""
        eos = self.engine_dir.generation_config().get("eos_token_id")
        if eos is None:
            return []
        return list(eos) if isinstance(eos, list) else [eos]

    def speculative_config(
        self,
        mode: str,
        tree_budget: int | None = None,
        tree: str | None = None,
        *,
        policy: str = "fixed",
        chain_seed: bool = False,
    ) -> SpeculativeConfig:
        """Mode and policy by name; budget and tree kind default to what the engine has."""
        built = self.engine_dir.manifest["speculative_config"] or {}
        kind = tree or built.get("tree", "dynamic")
        budget = built.get("tree_budget", 0) if tree_budget is None else tree_budget
        return SpeculativeConfig(
            DecodingMode[mode.upper()],
            TreeKind[kind.upper()],
            budget,
            policy=BudgetPolicy[policy.upper()],
            chain_seed=chain_seed,
        )

    def complete(self, request: Request) -> Completion:
        """Run one request to its end."""
        return self.complete_all([request])[0]

    def complete_all(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests together, each step batching what fits; answers in their order."""
        started = time.perf_counter()
        tokens: dict[int, list[int]] = {}
        try:
            for request in requests:
                tokens[self.enqueue(request)] = []
        except RequestError:
            for request_id in tokens:
                self.executor.cancel_request(request_id)
            list(self.responses())  # their last responses
            raise
        finished: dict[int, Completion] = {}
        for response in self.responses():
            tokens[response.request_id] += response.token_ids
            if response.finished:
                finished[response.request_id] = Completion(
                    tokens[response.request_id],
                    response.finish_reason,
                    response.statistics,
                    time.perf_counter() - started,
                )
        return [finished[request_id] for request_id in tokens]

    def stream(self, request: Request, on_text: Callable[[str], None]) -> Completion:
        """Run one request, handing over text as it becomes certain."""
        started = time.perf_counter()
        self.enqueue(request)
        text, token_ids = self.tokenizer.stream(), []
        for response in self.responses():
            token_ids += response.token_ids
            on_text(text.push(response.token_ids))
        on_text(text.finish())
        seconds = time.perf_counter() - started
        return Completion(token_ids, response.finish_reason, response.statistics, seconds)

    def enqueue(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises:
            RequestError: the engine cannot serve it.
        """
        try:
            return self.executor.enqueue_request(request)
        except ValueError as error:
            raise RequestError(str(error)) from None

    def responses(self) -> Iterator[_core.Response]:
        """Everything the executor answers until no request is left."""
        while batch := self.executor.await_responses():
            yield from batch
