"""Promise 1 on the CPU engine: a row's logits depend on nothing else in the step.

Every row of a random tree gives, byte for byte, the logits of plain decoding along its
path, whatever the batch, page size, budget, thread count and instruction set.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import DEMO_VOCAB as VOCAB
from steps import path_to, prefill, random_tree, run_rows
from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import DecodingMode, Executor, Request, SpeculativeConfig

KV_TOKENS = 4096

Load = Callable[..., _core.Engine]


@pytest.fixture(scope="module")
def load(demo_engine: Callable[..., Path]) -> Load:
    """The demo's CPU engine by activations, page size, threads and instruction set."""

    @cache
    def loaded(activations: str, page_size: int, threads: int, isa: str = "") -> _core.Engine:
        path = demo_engine(
            backend="cpu",
            activations=activations,
            page_size=page_size,
            kv_tokens=KV_TOKENS,
            max_tree_budget=128,
            max_num_rows=2048,
        )
        return load_cpu_engine(EngineDir.open(path), num_threads=threads, isa=isa)

    return loaded


def pages_of(request: int, page_size: int) -> list[int]:
    """An eighth of the pool for each request, in an order of its own."""
    count = KV_TOKENS // page_size // 8
    pages = list(range(request * count, (request + 1) * count))
    random.Random(request).shuffle(pages)
    return pages


def plain_logits(engine: _core.Engine, page_size: int, tokens: list[int]) -> np.ndarray:
    """Logits after the last of the tokens, each decoded in a step of its own."""
    pages = pages_of(0, page_size)
    for position, token in enumerate(tokens):
        logits = prefill(engine, _core.Sequence(99, 0, position, pages), [token])
    return logits[0]


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    batch=st.lists(
        st.tuples(
            st.integers(0, 70),  # prefix
            st.sampled_from([0, 1, 7, 16, 31, 32, 33, 64, 65, 128]),  # budget
        ),
        min_size=1,
        max_size=8,
    ),
    page_size=st.sampled_from([1, 16, 64, 128]),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    load: Load,
    activations: str,
    seed: int,
    batch: list[tuple[int, int]],
    page_size: int,
    threads: int,
) -> None:
    rng = random.Random(seed)
    engine = load(activations, page_size, threads)
    requests, prefixes = [], []
    for index, (prefix_length, budget) in enumerate(batch):
        pages = pages_of(index, page_size)
        prefix = [rng.randrange(VOCAB) for _ in range(prefix_length)]
        if prefix:
            prefill(engine, _core.Sequence(index, index, 0, pages), prefix)
        tokens, parents = random_tree(rng, budget, VOCAB)
        requests.append((_core.Sequence(index, index, prefix_length, pages), tokens, parents))
        prefixes.append(prefix)
    together = run_rows(engine, requests)

    alone = load(activations, 16, 1)  # a second engine: its caches are its own
    for (_, tokens, parents), prefix, logits in zip(requests, prefixes, together, strict=True):
        for row in rng.sample(range(len(tokens)), min(2, len(tokens))):
            path = [*prefix, *(tokens[r] for r in path_to(row, parents))]
            expected = plain_logits(alone, 16, path)
            assert logits[row].tobytes() == expected.tobytes()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_committed_path_continues_as_if_decoded_plainly(load: Load, page_size: int) -> None:
    """Commit moves KV across pages; what follows has the bits of plain decoding."""
    rng = random.Random(5)
    engine, alone = load("nvfp4", page_size, 2), load("nvfp4", 64, 1)
    pages = pages_of(1, page_size)
    committed: list[int] = [rng.randrange(VOCAB) for _ in range(13)]
    prefill(engine, _core.Sequence(1, 1, 0, pages), committed)
    for _ in range(6):
        at = _core.Sequence(1, 1, len(committed), pages)
        tokens, parents = random_tree(rng, 40, VOCAB)
        (logits,) = run_rows(engine, [(at, tokens, parents)])
        path = path_to(max(range(41), key=lambda row: len(path_to(row, parents))), parents)
        expected = plain_logits(alone, 64, committed + [tokens[row] for row in path])
        assert logits[path[-1]].tobytes() == expected.tobytes()
        engine.commit([_core.Commit(at, path)])
        committed += [tokens[row] for row in path]


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_watching_changes_nothing(load: Load, activations: str) -> None:
    """Watched, ops run one by one; otherwise rows go through several of them at once."""
    engine = load(activations, 16, 2)
    at = _core.Sequence(1, 0, 20, pages_of(1, 16))
    prefill(engine, _core.Sequence(1, 0, 0, at.pages), list(range(20)))
    tree = random_tree(random.Random(3), 16, VOCAB)
    (expected,) = run_rows(engine, [(at, *tree)])
    seen: list[str] = []
    engine.observe(lambda network, op, inputs, outputs: seen.append(op))
    (watched,) = run_rows(engine, [(at, *tree)])
    engine.observe(None)
    assert len(seen) > 80
    assert watched.tobytes() == expected.tobytes()


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_every_instruction_set_gives_the_same_bits(load: Load, activations: str) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(40)]
    results = set()
    for isa in ("portable", "avx2", "avx512"):
        try:
            engine = load(activations, 16, 1, isa)
        except ValueError as error:
            assert isa in str(error)  # this CPU or build lacks it
            continue
        at = _core.Sequence(1, 0, 0, pages_of(0, 16))
        logits = prefill(engine, at, prompt)
        draft = engine.draft([_core.DraftRequest(_core.Sequence(1, 0, 40, pages_of(0, 16)), 3)], 8)
        results.add(logits.tobytes() + draft.log_probs.tobytes() + draft.token_ids.tobytes())
    assert len(results) == 1


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
            st.sampled_from([-1, 0, 1, 16, 33, 64, 128]),  # budget; -1: chain
        ),
        min_size=1,
        max_size=8,
    ),
    page_size=st.sampled_from([1, 16, 64, 128]),
    activations=st.sampled_from(["nvfp4", "bf16"]),
)
def test_the_executor_is_lossless(
    load: Load, batch: list[tuple[list[int], int]], page_size: int, activations: str
) -> None:
    engine = load(activations, page_size, 2)

    def run(requests: list[Request]) -> list[list[int]]:
        executor = Executor(engine)
        output: dict[int, list[int]] = {executor.enqueue_request(r): [] for r in requests}
        while responses := executor.await_responses():
            for response in responses:
                output[response.request_id] += response.token_ids
        return list(output.values())

    def speculation(budget: int) -> SpeculativeConfig:
        if budget < 0:
            return SpeculativeConfig(DecodingMode.CHAIN)
        return SpeculativeConfig(DecodingMode.TREE, tree_budget=budget)

    plain = SpeculativeConfig(DecodingMode.PLAIN)
    together = run([Request(p, max_tokens=40, speculative=speculation(b)) for p, b in batch])
    for (prompt, _), tokens in zip(batch, together, strict=True):
        assert [tokens] == run([Request(prompt, max_tokens=40, speculative=plain)])
