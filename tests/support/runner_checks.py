"""Requests decoded by the C++ executor on a TensorRT runner."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import DEMO_PROMPTS, demo_text
from trtree import _core
from trtree.runtime.executor import DecodingMode, Executor, Request, SpeculativeConfig
from trtree.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TREE = SpeculativeConfig(DecodingMode.TREE, tree_budget=16)
MAX_TOKENS = 16

Requests = list[tuple[list[int], SpeculativeConfig]]


def prompts(count: int) -> list[list[int]]:
    """Tokens of text that the pair knows: the demo's prompts, and others like them in pieces."""
    tokenizer = Tokenizer(ROOT / "configs" / "demo" / "target_nvfp4")
    encoded = [tokenizer.encode(prompt) for prompt in DEMO_PROMPTS]
    words = tokenizer.encode(demo_text(20))
    while len(encoded) < count:
        start = 61 * len(encoded) % (len(words) - 40)
        encoded.append(words[start : start + 3 + len(encoded)])
    return [tokens[:60] for tokens in encoded[:count]]


def decode(engine: _core.Engine, requests: Requests) -> list[list[int]]:
    return [tokens for tokens, _ in decode_counting(engine, requests)]


def decode_counting(engine: _core.Engine, requests: Requests) -> list[tuple[list[int], int]]:
    """Per request its tokens, and in how many verify passes they came."""
    executor = Executor(engine)
    tokens: dict[int, list[int]] = {}
    passes: dict[int, int] = {}
    for prompt, speculative in requests:
        request = Request(prompt, max_tokens=MAX_TOKENS, speculative=speculative)
        tokens[executor.enqueue_request(request)] = []
    while responses := executor.await_responses():
        for response in responses:
            tokens[response.request_id] += response.token_ids
            passes[response.request_id] = response.statistics.verify_forwards
    return [(tokens[request_id], passes[request_id]) for request_id in tokens]


def on_all_ranks(engines: Sequence[_core.Engine], requests: Requests) -> list[list[int]]:
    """Each rank has an executor and a runner of its own, and must decode the same."""
    with ThreadPoolExecutor(len(engines)) as pool:
        first, *others = pool.map(lambda engine: decode(engine, requests), engines)
    assert all(other == first for other in others)
    return first
