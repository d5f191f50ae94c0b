"""Requests run to their ends."""

from trtree import _core
from trtree.runtime.executor import Executor, ExecutorConfig, KvCacheConfig, Request, Response


class Answer:
    """All of one request's responses."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.log_probs: list[_core.TokenLogProbs] = []
        self.prompt_log_probs: list[_core.TokenLogProbs] = []
        self.last: Response | None = None

    def add(self, response: Response) -> None:
        self.token_ids += response.token_ids
        self.log_probs += response.log_probs
        self.prompt_log_probs += response.prompt_log_probs
        self.last = response

    def figures(self) -> list[object]:
        """All that a client sees, log-probs to the last bit."""
        probs = [(p.log_prob, p.rank, p.top) for p in self.prompt_log_probs + self.log_probs]
        return [self.token_ids, probs, self.last and self.last.finish_reason]


def run(executor: Executor, requests: list[Request]) -> list[tuple[list[int], Response]]:
    """Run requests together; tokens and last response of each, in their order."""
    ids = [executor.enqueue_request(request) for request in requests]
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    last: dict[int, Response] = {}
    while responses := executor.await_responses():
        for response in responses:
            tokens[response.request_id] += response.token_ids
            last[response.request_id] = response
    return [(tokens[request_id], last[request_id]) for request_id in ids]


def run_alone(engine: _core.Engine, requests: list[Request]) -> list[list[int]]:
    """Tokens of each request, decoded with nothing before it or beside it."""
    cold = ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False))
    return [tokens for r in requests for tokens, _ in run(Executor(engine, cold), [r])]
