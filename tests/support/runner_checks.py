"""Requests decoded by the C++ executor on a TensorRT runner."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines import DEMO_PROMPTS, demo_text
from steps import path_to, random_tree, run_rows
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
    return run_counting(Executor(engine), requests)


def run_counting(executor: Executor, requests: Requests) -> list[tuple[list[int], int]]:
    """The same by an executor, with what it has cached."""
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


def furthest_from_paths(trees: _core.Engine, paths: _core.Engine, vocab: int, pages: int) -> float:
    """Logits of random trees' rows on one engine against each row's path alone on another, behind
    random accepted paths: the furthest apart. pages: that the request has."""
    rng, length, worst = random.Random(3), 0, 0.0
    for _ in range(5):
        tokens, parents = random_tree(rng, 24, vocab)
        at = _core.Sequence(0, 0, length, list(range(pages)))
        (logits,) = run_rows(trees, [(at, tokens, parents)])
        path = path_to(rng.randrange(12, len(tokens)), parents)
        chain = [tokens[r] for r in path]
        (alone,) = run_rows(paths, [(at, chain, list(range(-1, len(chain) - 1)))])
        worst = max(worst, float(abs(logits[path] - alone).max()))
        trees.commit([_core.Commit(at, path)])
        paths.commit([_core.Commit(at, list(range(len(path))))])
        length += len(path)
    return worst


def on_all_ranks(engines: Sequence[_core.Engine], requests: Requests) -> list[list[int]]:
    """Each rank has an executor and a runner of its own, and must decode the same."""
    with ThreadPoolExecutor(len(engines)) as pool:
        first, *others = pool.map(lambda engine: decode(engine, requests), engines)
    assert all(other == first for other in others)
    return first
