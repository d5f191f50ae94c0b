"""Hybrid targets on the CPU engine: op by op against the reference, bitwise lossless, served.

Rows of a tree continue their parents' recurrent state; every test here would see a sibling's
update leak into another branch or into the committed state.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitwise import (
    Batch,
    batches,
    check_commits,
    check_trees,
    few_examples,
    pages_of,
    plain_logits,
)
from decoding import run, run_alone
from op_by_op import OpByOp
from random_engines import RandomEngines
from random_hybrid import hybrid_config
from request_mixes import PLAIN, mixed_requests
from steps import path_to, prefill, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.engine_dir import EngineDir
from trtree.build.options import BuildOptions
from trtree.build.plan import memory_plan
from trtree.build.text_files import size_text
from trtree.plugins import branch_state
from trtree.plugins.gated_delta_net import reference as delta_reference
from trtree.runtime.engines import open_engine
from trtree.runtime.executor import (
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    Request,
)

VOCAB = 80
FAMILIES = {
    "next": hybrid_config("Qwen3NextForCausalLM"),
    "3.5": hybrid_config("Qwen3_5ForCausalLM"),
    "3.5-moe": hybrid_config("Qwen3_5MoeForCausalLM"),
}
# Op by op: ops compute in float32 here, in float64 in the reference.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> RandomEngines:
    return RandomEngines(tmp_path_factory.mktemp("hybrid"), FAMILIES, max_num_rows=512)


@pytest.mark.parametrize("algorithm", ["NVFP4", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_op_by_op(engines: RandomEngines, family: str, algorithm: str | None) -> None:
    _, engine = open_engine(engines.build(family, algorithm))
    _, reference = open_engine(engines.build(family, algorithm, backend="reference"))
    check = OpByOp(engine, reference)
    check.prompt_and_tree(VOCAB)
    engine.observe(None)
    assert set(check.worst) >= {"causal_conv", "gated_delta_net", "sigmoid_mul", "split"}
    assert max(check.worst.values()) < TOLERANCE, check.worst


@pytest.mark.parametrize("family", FAMILIES)
@few_examples(8)
@given(
    seed=st.integers(0, 2**32),
    batch=batches(prefixes=40, budgets=[0, 1, 7, 31, 32, 33, 64, 65], requests=6),
    threads=st.sampled_from([1, 2]),
)
def test_tree_rows_equal_plain_decoding_byte_for_byte(
    engines: RandomEngines, family: str, seed: int, batch: Batch, threads: int
) -> None:
    engine = engines.load(family, "NVFP4", threads)
    alone = engines.load(family, "NVFP4", isa="portable")
    check_trees(engine, alone, batch, seed=seed, vocab=VOCAB)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_committed_path_continues_as_if_decoded_plainly(
    engines: RandomEngines, family: str
) -> None:
    check_commits(engines.load(family, threads=2), engines.load(family), vocab=VOCAB)


def test_a_planted_leak_between_siblings_is_caught(
    engines: RandomEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that continue the row before them, whoever their parent is: a chain is still
    right, a tree is not."""

    def leaky(committed: torch.Tensor, segments: Any, move: Any) -> torch.Tensor:
        chains = [replace(s, parents=list(range(-1, s.num_rows - 1))) for s in segments]
        return branch_state.walk(committed, chains, move)

    prefix, path = [5, 6, 7], [11, 12]

    def last_row(tokens: list[int], parents: list[int]) -> np.ndarray:
        _, engine = open_engine(engines.build("3.5", backend="reference"))
        prefill(engine, _core.Sequence(1, 0, 0, pages_of(0)), prefix)
        at = _core.Sequence(1, 0, len(prefix), pages_of(0))
        return run_rows(engine, [(at, tokens, parents)])[0][-1]

    right = last_row(path, [-1, 0])
    assert last_row([11, 40, 12], [-1, 0, 0]).tobytes() == right.tobytes()
    monkeypatch.setattr(delta_reference, "walk", leaky)
    assert last_row(path, [-1, 0]).tobytes() == right.tobytes()
    assert np.abs(last_row([11, 40, 12], [-1, 0, 0]) - right).max() > 1e-3


def test_a_slot_is_started_afresh(engines: RandomEngines) -> None:
    """Whatever another request left in it."""
    engine = engines.load("3.5")
    prompt = [3, 1, 4, 1, 5]
    first = prefill(engine, _core.Sequence(1, 2, 0, pages_of(0)), prompt)
    prefill(engine, _core.Sequence(1, 2, 5, pages_of(0)), [9, 2, 6])
    again = prefill(engine, _core.Sequence(2, 2, 0, pages_of(1)), prompt)
    assert first.tobytes() == again.tobytes()
    after = prefill(engine, _core.Sequence(2, 2, 5, pages_of(1)), [7])
    other = prefill(engine, _core.Sequence(3, 4, 0, pages_of(2)), [*prompt, 7])
    assert after[0].tobytes() == other[5].tobytes()


CACHE = KvCacheConfig(snapshot_interval=8)


@pytest.mark.parametrize(
    ("kv_tokens", "page_size"),
    [(4096, 16), (4096, 1), (320, 16), (320, 1)],
    ids=["room-16", "room-1", "pre-empts-16", "pre-empts-1"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_requests_answer_as_if_alone(
    engines: RandomEngines, family: str, kv_tokens: int, page_size: int
) -> None:
    """Also where the pool is too small for all at once, and where they begin with what others
    have left: pages, and snapshots of their state."""
    engine = engines.load(family, threads=2, kv_tokens=kv_tokens, page_size=page_size)
    assert engine.capabilities().tree_state == _core.TreeState.EXACT
    requests = mixed_requests(16, random.Random(2), vocab=VOCAB)
    expected = run_alone(engines.load(family), requests)
    executor = Executor(engine, ExecutorConfig(kv_cache_config=CACHE, record_rounds=True))
    rows = []
    for _ in range(2):
        assert [tokens for tokens, _ in run(executor, requests)] == expected
        rows.append(sum(len(r.token_ids) for r in executor.take_rounds() if r.prefill))
    statistics = executor.latest_statistics()
    assert (statistics.preemptions > 0) == (kv_tokens == 320)
    assert statistics.prefix_cache
    assert statistics.snapshots_loaded > 0
    if kv_tokens == 4096:
        assert rows[1] < 0.7 * rows[0]  # prompts that have been seen


def test_200_requests_at_once_answer_as_if_alone(engines: RandomEngines) -> None:
    """Cold, and on what they left themselves."""
    requests = mixed_requests(200, random.Random(9), vocab=VOCAB)
    expected = run_alone(engines.load("3.5-moe"), requests)
    assert all(len(t) == r.max_tokens for t, r in zip(expected, requests, strict=True))
    executor = Executor(engines.load("3.5-moe", threads=2), ExecutorConfig(kv_cache_config=CACHE))
    for warm in (False, True):
        before = executor.latest_statistics()
        assert [tokens for tokens, _ in run(executor, requests)] == expected
        after = executor.latest_statistics()
        cached = after.cached_prompt_tokens - before.cached_prompt_tokens
        print(
            f"{'warm' if warm else 'cold'}: {cached} of {after.prompt_tokens // (1 + warm)} prompt "
            f"tokens from {after.snapshots_loaded - before.snapshots_loaded} snapshots, "
            f"{after.total_snapshots} places"
        )
        assert cached > 0


def test_saved_states_continue_as_the_slot_did(engines: RandomEngines) -> None:
    """A state saved inside a prompt's chunk, and two on a path through a tree, in another slot."""
    rng = random.Random(4)
    engine = engines.load("3.5", "NVFP4", 2)
    tokens, parents = random_tree(rng, 30, VOCAB)
    prompt = [rng.randrange(VOCAB) for _ in range(33)]
    at = _core.Sequence(1, 1, 0, pages_of(1))
    run_rows(engine, [(at, prompt, list(range(-1, 32)))])
    engine.commit([_core.Commit(at, list(range(33)), saves=[_core.StateSave(32, 3)])])
    at = _core.Sequence(1, 1, 33, pages_of(1))
    run_rows(engine, [(at, tokens, parents)])
    path = max((path_to(row, parents) for row in range(31)), key=len)
    assert len(path) > 3
    saves = [_core.StateSave(1, 5), _core.StateSave(len(path) - 1, 0)]
    engine.commit([_core.Commit(at, path, saves=saves)])
    text = prompt + [tokens[row] for row in path]
    # Another request's step in the slot that the states are loaded to.
    prefill(engine, _core.Sequence(2, 4, 0, pages_of(2)), prompt[:9])
    for snapshot, length in ((3, 32), (5, 34), (0, 32 + len(path))):
        engine.load_state(snapshot, 4)
        at = _core.Sequence(3, 4, length, pages_of(1))
        (logits,) = run_rows(engine, [(at, [text[length]], [-1])])
        assert logits[0].tobytes() == plain_logits(engine, text[: length + 1])


@pytest.mark.parametrize(
    ("saves", "named"),
    [
        ([(0, 1)], "after 0 of 3 committed rows, the one before it after 0"),
        ([(4, 1)], "after 4 of 3 committed rows"),
        ([(2, 1), (2, 2)], "after 2 of 3 committed rows, the one before it after 2"),
        ([(1, 16)], "snapshot 16 of 16"),
        ([(1, -1)], "snapshot -1 of 16"),
        ([(1, 2), (3, 2)], "snapshot 2 is saved twice"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_saves_that_cannot_be(
    engines: RandomEngines, backend: str, saves: list[tuple[int, int]], named: str
) -> None:
    _, engine = open_engine(engines.build("3.5", backend=backend))
    at = _core.Sequence(1, 0, 0, pages_of(0))
    run_rows(engine, [(at, [1, 2, 3], [-1, 0, 1])])
    with pytest.raises(ValueError, match=named):
        engine.commit([_core.Commit(at, [0, 1, 2], saves=[_core.StateSave(*s) for s in saves])])
    with pytest.raises(ValueError, match="snapshot 16 of 16"):
        engine.load_state(16, 0)
    with pytest.raises(ValueError, match="slot 8 of 8"):
        engine.load_state(0, 8)


def test_the_reference_saves_states_too(engines: RandomEngines) -> None:
    _, engine = open_engine(engines.build("next", backend="reference"))
    executor = Executor(engine, ExecutorConfig(kv_cache_config=CACHE))
    requests = [Request([7] * 40, 4, speculative=PLAIN)]
    [(cold, _)], [(warm, last)] = run(executor, requests), run(executor, requests)
    assert cold == warm
    assert last.statistics.cached_tokens == 32


def test_the_plan_names_memory_per_request(engines: RandomEngines) -> None:
    engine = EngineDir.open(engines.build("3.5"))
    # Per value head 16 x 32 numbers, and 3 inputs of 2 * 32 + 128 channels; one such layer.
    per_request = 4 * (4 * 16 * 32 + 3 * 192)
    assert engine.manifest["build_config"]["request_state_bytes"] == per_request
    options = BuildOptions(
        checkpoint=engines.checkpoint("3.5"), output=engine.path, max_batch_size=8
    )
    # A row keeps its convolution's input, key, update and decay: what a tree adds, and all.
    per_row = 4 * (192 + 32 + 128 + 4)
    for budget in (0, 16, 500):
        changes = {"tree_budget": budget, "max_num_rows": budget + 65}
        rows = dict(memory_plan(builder.describe(options.with_overrides(changes))))
        assert rows["recurrent state, 8 x 10.2 KiB"] == "82.0 KiB"
        assert rows["snapshots of it, 16 x 10.2 KiB"] == "164.0 KiB"
        kept = f"kept of a step, {budget + 65} rows x {per_row / 1024:.1f} KiB"
        assert rows[kept] == size_text((budget + 65) * per_row)
    none = options.with_overrides({"state_snapshots": 0})
    assert not any("snapshots" in name for name in dict(memory_plan(builder.describe(none))))
