"""Promise 1 on the CPU engine: a row's logits depend on nothing else in the step.

Every row of a random tree gives, byte for byte, the logits of plain decoding along its
path, whatever the batch, page size, budget, thread count and instruction set.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwise import (
    PAGE,
    POOL_TOKENS,
    Batch,
    batches,
    check_commits,
    check_instruction_sets,
    check_trees,
    few_examples,
    pages_of,
)
from decoding import run, run_alone
from engines import DEMO_VOCAB as VOCAB
from request_mixes import CHAIN, PLAIN, tree
from steps import prefill, random_tree, run_rows
from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.engines.cpu import load_cpu_engine
from trtree.runtime.executor import Executor, Request, SpeculativeConfig

Load = Callable[..., _core.Engine]


@pytest.fixture(scope="module")
def load(demo_engine: Callable[..., Path]) -> Load:
    """The demo's CPU engine by activations, page size, threads and instruction set."""

    @cache
    def loaded(
        activations: str, page_size: int = PAGE, threads: int = 1, isa: str = ""
    ) -> _core.Engine:
        path = demo_engine(
            backend="cpu",
            activations=activations,
            page_size=page_size,
            kv_tokens=POOL_TOKENS,
            max_tree_budget=128,
            max_num_rows=2048,
        )
        return load_cpu_engine(EngineDir.open(path), num_threads=threads, isa=isa)

    return loaded


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
@few_examples(12)
@given(
    seed=st.integers(0, 2**32),
    batch=batches(prefixes=70, budgets=[0, 1, 7, 16, 31, 32, 33, 64, 65, 128], requests=8),
    page_size=st.sampled_from([1, 16, 64, 128]),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    load: Load, activations: str, seed: int, batch: Batch, page_size: int, threads: int
) -> None:
    engine, alone = load(activations, page_size, threads), load(activations)
    check_trees(engine, alone, batch, seed=seed, vocab=VOCAB, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_committed_path_continues_as_if_decoded_plainly(load: Load, page_size: int) -> None:
    """Commit moves KV across pages; what follows has the bits of plain decoding."""
    engine, alone = load("nvfp4", page_size, 2), load("nvfp4")
    assert check_commits(engine, alone, vocab=VOCAB, page_size=page_size) > 2 * PAGE


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_watching_changes_nothing(load: Load, activations: str) -> None:
    """Watched, ops run one by one; otherwise rows go through several of them at once."""
    engine = load(activations, 16, 2)
    at = _core.Sequence(1, 0, 20, pages_of(1))
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
    check_instruction_sets(lambda isa: load(activations, isa=isa), VOCAB)


def speculation(budget: int) -> SpeculativeConfig:
    return CHAIN if budget < 0 else tree(budget)


@few_examples(10)
@given(
    batch=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
            st.sampled_from([-1, 0, 1, 16, 33, 64, 128]).map(speculation),
        ),
        min_size=1,
        max_size=8,
    ),
    page_size=st.sampled_from([1, 16, 64, 128]),
    activations=st.sampled_from(["nvfp4", "bf16"]),
)
def test_the_executor_is_lossless(
    load: Load,
    batch: list[tuple[list[int], SpeculativeConfig]],
    page_size: int,
    activations: str,
) -> None:
    engine = load(activations, page_size, 2)
    requests = [Request(prompt, max_tokens=40, speculative=mode) for prompt, mode in batch]
    together = [tokens for tokens, _ in run(Executor(engine), requests)]
    plain = [Request(prompt, max_tokens=40, speculative=PLAIN) for prompt, _ in batch]
    assert together == run_alone(engine, plain)
