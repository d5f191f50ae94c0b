"""Requests run to their ends."""

from trtree.runtime.executor import Executor, Request, Response


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
