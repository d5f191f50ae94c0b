"""Prefixes of requests with recurrent state: they begin at pages that have a snapshot of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import run
from request_mixes import CHAIN, NO_EVICT, PLAIN, specs, tree
from toy_engine import ToyEngine, decode
from trtree import _core
from trtree.runtime.executor import (
    Executor,
    ExecutorConfig,
    KvCacheConfig,
    Request,
    SchedulerConfig,
    SpeculativeConfig,
)
from wrapped_engine import FailingEngine


def executor_of(engine: _core.Engine, interval: int = 4, **config: object) -> Executor:
    cache = KvCacheConfig(snapshot_interval=interval)
    return Executor(engine, ExecutorConfig(kv_cache_config=cache, **config))


def cached(executor: Executor, prompt: list[int], mode: SpeculativeConfig = PLAIN) -> int:
    """Cached tokens of a request with this prompt, which is answered as it should be."""
    [(tokens, last)] = run(executor, [Request(prompt, 3, speculative=mode)])
    assert tokens == decode(prompt, 3, 13)
    return last.statistics.cached_tokens


@settings(max_examples=60, deadline=None)
@given(
    specs,
    specs,
    st.sampled_from([1, 4, 16]),
    st.integers(96, 200),
    st.sampled_from([1, 3, 60]),
    st.sampled_from([1, 8, 32]),
    st.sampled_from([SchedulerConfig(), NO_EVICT]),
)
def test_any_mix_of_requests_is_answered_as_if_alone(
    cold: list[tuple[list[int], int, SpeculativeConfig]],
    warm: list[tuple[list[int], int, SpeculativeConfig]],
    page_size: int,
    pool_tokens: int,
    snapshots: int,
    interval: int,
    scheduler: SchedulerConfig,
) -> None:
    """The toy engine looks at the state of every slot in every step."""
    engine = ToyEngine(
        page_size=page_size,
        num_pages=pool_tokens // page_size,
        max_num_rows=130,
        state_snapshots=snapshots,
    )
    executor = executor_of(engine, interval, scheduler_config=scheduler)
    for group in (cold, warm, warm):
        results = run(executor, [Request(p, n, speculative=c) for p, n, c in group])
        for (prompt, max_tokens, _), (tokens, _) in zip(group, results, strict=True):
            assert tokens == decode(prompt, max_tokens, 13)
    after = executor.latest_statistics()
    assert after.prefix_cache
    assert after.total_snapshots == snapshots >= after.cached_snapshots
    assert after.free_pages + after.cached_pages == after.total_pages
    assert after.cached_prompt_tokens == 0 or after.snapshots_loaded > 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", [PLAIN, CHAIN, tree(16)])
def test_a_warm_prefix_is_not_run_again(page_size: int, mode: SpeculativeConfig) -> None:
    engine = ToyEngine(page_size=page_size, num_pages=800 // page_size, state_snapshots=8)
    executor = executor_of(engine)
    prompt = [i * 7 % 13 for i in range(100)]
    [(first, cold)] = run(executor, [Request(prompt, 8, speculative=mode)])
    rows = sum(batch.num_rows for batch in engine.batches)
    assert len([b for b in engine.batches if b.segments[0].num_rows == 100]) == 1  # not cut
    engine.batches.clear()
    [(second, warm)] = run(executor, [Request(prompt, 8, speculative=mode)])
    assert first == second == decode(prompt, 8, 13)
    assert cold.statistics.cached_tokens == 0
    assert warm.statistics.cached_tokens == 99 // page_size * page_size
    assert sum(b.num_rows for b in engine.batches) == rows - warm.statistics.cached_tokens
    assert executor.latest_statistics().snapshots_loaded == 1


def test_what_prompts_have_in_common_is_found_by_the_second() -> None:
    executor = executor_of(ToyEngine(state_snapshots=8))
    common = [i % 13 for i in range(41)]
    # The first one's snapshot is behind its own words, the second's also where they part.
    assert cached(executor, [*common, 1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert cached(executor, [*common, 8, 7, 6, 5, 4, 3, 2, 1]) == 0
    assert cached(executor, [*common, 5, 5, 5, 5, 5, 5, 5, 5]) == 40


def test_conversations_go_on_from_their_own_output() -> None:
    executor = executor_of(ToyEngine(state_snapshots=2), interval=8)
    [(answer, _)] = run(executor, [Request([1, 2, 3], 60, speculative=tree(8))])
    turn = [1, 2, 3, *answer, 5, 6]
    [(tokens, last)] = run(executor, [Request(turn, 5, speculative=tree(8))])
    assert tokens == decode(turn, 5, 13)
    assert last.statistics.cached_tokens >= 48
    # It had one place that moved along, and took no second one for its prompt of a page.
    assert executor.latest_statistics().snapshots_saved > 5


def test_a_snapshot_that_others_began_with_stays() -> None:
    executor = executor_of(ToyEngine(state_snapshots=8))
    prompt = [i % 13 for i in range(40)]
    [(answer, _)] = run(executor, [Request(prompt, 40, speculative=PLAIN)])
    text = prompt + answer
    assert cached(executor, [*text, 1]) == 76  # where the answer's last snapshot is
    run(executor, [Request([*text, 1], 40, speculative=PLAIN)])
    assert cached(executor, [*text, 2]) == 80
    assert cached(executor, prompt) == 36


def test_the_longest_unused_snapshot_makes_way() -> None:
    executor = executor_of(ToyEngine(state_snapshots=2))
    one, two, three = ([i] * 17 for i in (1, 2, 3))
    assert [cached(executor, p) for p in (one, two, one, three)] == [0, 0, 16, 0]
    # Pages are there, but no state to go on from.
    assert cached(executor, two) == 0
    assert executor.latest_statistics().cached_snapshots == 2


def test_a_snapshot_goes_with_its_page() -> None:
    executor = executor_of(ToyEngine(page_size=4, num_pages=40, state_snapshots=8), interval=64)
    long = [i % 13 for i in range(70)]
    run(executor, [Request(long, 1, speculative=PLAIN)])
    assert executor.latest_statistics().cached_snapshots == 1
    run(executor, [Request([9, *long, *long[:50]], 1, speculative=PLAIN)])  # takes the room
    assert executor.latest_statistics().cached_snapshots == 1
    assert cached(executor, long) == 0


def test_a_preempted_request_goes_on_from_its_snapshot() -> None:
    engine = ToyEngine(page_size=4, num_pages=60, max_num_rows=256, state_snapshots=16)
    executor = executor_of(engine)
    prompts = [[i] * 24 for i in range(4)]
    requests = [Request(prompt, 40, speculative=PLAIN) for prompt in prompts]
    for (tokens, _), prompt in zip(run(executor, requests), prompts, strict=True):
        assert tokens == decode(prompt, 40, 13)
    statistics = executor.latest_statistics()
    assert statistics.preemptions > 0
    assert statistics.snapshots_loaded > 0
    rows = sum(batch.num_rows for batch in engine.batches)
    engine.batches.clear()
    without = Executor(engine, ExecutorConfig(kv_cache_config=KvCacheConfig(False)))
    run(without, requests)
    assert without.latest_statistics().total_snapshots == 0
    assert rows < sum(batch.num_rows for batch in engine.batches)


def test_engines_without_snapshots_begin_at_the_beginning() -> None:
    executor = executor_of(ToyEngine(state_snapshots=0))
    prompt = [i % 13 for i in range(40)]
    assert [cached(executor, prompt), cached(executor, prompt)] == [0, 0]
    assert not executor.latest_statistics().prefix_cache
    assert executor.latest_statistics().cached_pages == 0


@pytest.mark.parametrize(
    ("call", "at"),
    [("half", 1), ("half", 2), ("half", 4), ("half", 9), ("load_state", 1), ("load_state", 3)],
)
def test_a_failed_round_leaves_no_snapshot(call: str, at: int) -> None:
    engine = FailingEngine(ToyEngine(state_snapshots=3, num_pages=40), call, at)
    executor = executor_of(engine)
    prompts = [[*range(9), i // 2, *range(i)] for i in range(8)]
    for _ in range(2):
        ids = [executor.enqueue_request(Request(p, 20, speculative=tree(4))) for p in prompts]
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        for _ in range(500):
            try:
                responses = executor.await_responses()
            except RuntimeError:
                continue
            if not responses:
                break
            for response in responses:
                tokens[response.request_id] += response.token_ids
        assert tokens == {i: decode(p, 20, 13) for i, p in zip(ids, prompts, strict=True)}
    assert engine.failed
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == after.total_pages
    assert after.prompt_tokens == 2 * sum(map(len, prompts))
    assert after.cached_snapshots <= 3


def test_cancelled_requests_leave_their_snapshots() -> None:
    executor = executor_of(ToyEngine(state_snapshots=8))
    prompt = [i % 13 for i in range(40)]
    first = executor.enqueue_request(Request(prompt, 100, speculative=PLAIN))
    executor.await_responses()
    executor.cancel_request(first)
    assert [r.request_id for r in executor.await_responses()] == [first]
    assert cached(executor, prompt) == 36


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="snapshot_interval must be at least 1, not 0"):
        executor_of(ToyEngine(state_snapshots=2), interval=0)
