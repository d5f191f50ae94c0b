"""KV pages under the executor: the prefix cache and pre-emption change no token."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import run
from request_mixes import CHAIN, NO_EVICT, PLAIN, specs, tree
from toy_engine import ToyEngine, decode
from trtree.runtime.executor import (
    Executor,
    ExecutorConfig,
    FinishReason,
    KvCacheConfig,
    QueueFullError,
    Request,
    SchedulerConfig,
    SpeculativeConfig,
)


@settings(max_examples=80, deadline=None)
@given(
    specs,
    specs,
    st.sampled_from([1, 4, 16]),
    st.integers(96, 200),
    st.booleans(),
    st.sampled_from([SchedulerConfig(), NO_EVICT]),
)
def test_small_pools_and_warm_prefixes_change_no_token(
    cold: list[tuple[list[int], int, SpeculativeConfig]],
    warm: list[tuple[list[int], int, SpeculativeConfig]],
    page_size: int,
    pool_tokens: int,
    reuse: bool,
    scheduler: SchedulerConfig,
) -> None:
    engine = ToyEngine(page_size=page_size, num_pages=pool_tokens // page_size, max_num_rows=130)
    executor = Executor(
        engine,
        ExecutorConfig(kv_cache_config=KvCacheConfig(reuse), scheduler_config=scheduler),
    )
    for group in (cold, warm, warm):
        results = run(executor, [Request(p, n, speculative=c) for p, n, c in group])
        for (prompt, max_tokens, _), (tokens, _) in zip(group, results, strict=True):
            assert tokens == decode(prompt, max_tokens, 13)
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == after.total_pages == engine.c.num_pages
    assert reuse or after.cached_pages == 0
    if scheduler is NO_EVICT:
        assert after.preemptions == 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("mode", [PLAIN, CHAIN, tree(16)])
def test_a_warm_prefix_is_not_computed_again(page_size: int, mode: SpeculativeConfig) -> None:
    engine = ToyEngine(page_size=page_size, num_pages=800 // page_size)
    executor = Executor(engine)
    prompt = [i * 7 % 13 for i in range(100)]
    [(first, cold)] = run(executor, [Request(prompt, 8, speculative=mode)])
    rows = sum(batch.num_rows for batch in engine.batches)
    engine.batches.clear()
    [(second, warm)] = run(executor, [Request(prompt, 8, speculative=mode)])
    assert first == second == decode(prompt, 8, 13)
    assert cold.statistics.cached_tokens == 0
    # All but the last token, in whole pages; the drafter's context comes with them, or the
    # toy engine would find a hole.
    assert warm.statistics.cached_tokens == 99 // page_size * page_size
    assert executor.latest_statistics().cached_prompt_tokens == warm.statistics.cached_tokens
    assert sum(b.num_rows for b in engine.batches) == rows - warm.statistics.cached_tokens
    assert warm.statistics.acceptance_length == cold.statistics.acceptance_length


def test_pages_without_the_drafters_keys_serve_plain_requests_only() -> None:
    executor = Executor(ToyEngine(page_size=4))
    prompt = list(range(12)) * 2
    run(executor, [Request(prompt, 4, speculative=PLAIN)])
    [(tokens, chain)] = run(executor, [Request(prompt, 4, speculative=CHAIN)])
    assert (chain.statistics.cached_tokens, tokens) == (0, decode(prompt, 4, 13))
    # Its own pages have taken the place of the plain request's.
    [(_, again)] = run(executor, [Request(prompt, 4, speculative=CHAIN)])
    [(_, plain)] = run(executor, [Request(prompt, 4, speculative=PLAIN)])
    assert again.statistics.cached_tokens == plain.statistics.cached_tokens == 20


def test_conversations_continue_from_their_own_output() -> None:
    executor = Executor(ToyEngine(page_size=4))
    [(answer, _)] = run(executor, [Request([1, 2, 3], 30, speculative=tree(8))])
    turn = [1, 2, 3, *answer, 5, 6]
    [(tokens, last)] = run(executor, [Request(turn, 5, speculative=tree(8))])
    assert tokens == decode(turn, 5, 13)
    assert last.statistics.cached_tokens >= 28


def test_cached_pages_make_way_and_the_longest_unused_go_first() -> None:
    engine = ToyEngine(page_size=4, num_pages=24)
    executor = Executor(engine)
    old, recent = [1] * 17, [2] * 17
    for prompt in (old, recent, old):
        run(executor, [Request(prompt, 1, speculative=PLAIN)])
    # 18 pages with the headroom: 16 are free, two of the eight cached ones have to go.
    run(executor, [Request([3] * 65, 1, speculative=PLAIN)])
    [(_, kept)] = run(executor, [Request(old, 1, speculative=PLAIN)])
    [(_, cut)] = run(executor, [Request(recent, 1, speculative=PLAIN)])
    assert (kept.statistics.cached_tokens, cut.statistics.cached_tokens) == (16, 8)


def test_a_tiny_pool_preempts_the_youngest_and_recomputes() -> None:
    engine = ToyEngine(page_size=4, num_pages=40)
    executor = Executor(engine)
    specs = [([i], 60, tree(16)) for i in range(6)]
    results = run(executor, [Request(p, n, speculative=c) for p, n, c in specs])
    for (prompt, max_tokens, _), (tokens, _) in zip(specs, results, strict=True):
        assert tokens == decode(prompt, max_tokens, 13)
    preemptions = [last.statistics.preemptions for _, last in results]
    assert preemptions[0] == 0
    assert sum(preemptions) == executor.latest_statistics().preemptions > 0


def test_a_long_prompt_is_not_starved_by_decoding_requests() -> None:
    engine = ToyEngine(max_num_rows=68, verify_width=17, page_size=16, num_pages=400)
    executor = Executor(engine)
    for i in range(4):  # their trees fill every step
        executor.enqueue_request(Request([i], 200, speculative=tree(16)))
    executor.await_responses()
    late = executor.enqueue_request(Request([7] * 100, 1, speculative=PLAIN))
    rounds = 0
    while all(r.request_id != late for r in executor.await_responses()):
        rounds += 1
    assert rounds < 10


def test_a_late_prompt_leaves_half_the_rows_to_decoding_requests() -> None:
    engine = ToyEngine(max_num_rows=34, verify_width=17)
    executor = Executor(engine)
    for i in range(2):  # their trees fill every step
        executor.enqueue_request(Request([i], 200, speculative=tree(16)))
    executor.await_responses()
    late = executor.enqueue_request(Request([7] * 100, 1, speculative=PLAIN))
    engine.batches.clear()
    while all(r.request_id != late for r in executor.await_responses()):
        pass
    for batch in engine.batches:
        assert any(segment.sequence.request_id != late for segment in batch.segments)


def test_a_preempted_request_is_not_overtaken() -> None:
    executor = Executor(
        ToyEngine(page_size=1, num_pages=100, max_batch_size=2),
        ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False)),
    )
    specs = [([1], 70), ([2] * 20, 40), ([3], 2)]
    ids = [executor.enqueue_request(Request(p, n, speculative=PLAIN)) for p, n in specs]
    ended = []
    while responses := executor.await_responses():
        ended += [r.request_id for r in responses if r.finished]
    assert executor.latest_statistics().preemptions == 1
    # The third begins behind the second, so not before the first has made room.
    assert ended == [ids[0], ids[2], ids[1]]


def test_a_full_queue_refuses_and_empties_again() -> None:
    executor = Executor(ToyEngine(), ExecutorConfig(max_queue_size=2))
    for i in range(2):
        executor.enqueue_request(Request([i], 4))
    with pytest.raises(QueueFullError, match="2 requests wait already, max_queue_size is 2"):
        executor.enqueue_request(Request([3], 4))
    while executor.await_responses():
        pass
    executor.enqueue_request(Request([3], 4))


def test_waiting_ends_with_the_timeout_and_with_a_request() -> None:
    executor = Executor(ToyEngine())
    started = time.monotonic()
    assert executor.await_responses(0.05) == []
    assert time.monotonic() - started >= 0.05


def test_shutdown_ends_what_is_left_and_takes_no_more() -> None:
    executor = Executor(ToyEngine(max_batch_size=1))
    ids = [executor.enqueue_request(Request([i], 50)) for i in range(3)]
    executor.await_responses()
    executor.shutdown()
    last = {r.request_id: r.finish_reason for r in executor.await_responses()}
    assert last == dict.fromkeys(ids, FinishReason.CANCELLED)
    assert executor.await_responses(10.0) == []  # at once
    with pytest.raises(RuntimeError, match="shut down"):
        executor.enqueue_request(Request([1], 1))


def test_rounds_are_recorded_where_asked() -> None:
    executor = Executor(ToyEngine(), ExecutorConfig(record_rounds=True))
    [(tokens, last)] = run(executor, [Request([1, 2, 3], 20, speculative=tree(8))])
    prefill, *rounds = executor.take_rounds()
    assert (prefill.prefill, prefill.token_ids, prefill.emitted_tokens) == (True, [1, 2, 3], 1)
    assert len(rounds) == last.statistics.verify_forwards
    assert sum(r.emitted_tokens for r in rounds) == len(tokens) - 1
    for record in rounds:
        assert len(record.token_ids) == len(record.parents) <= 9
        path = [record.token_ids[row] for row in record.accepted]
        at = record.committed_length - 3
        assert path == tokens[at : at + len(path)]
        assert min(record.draft_seconds, record.step_seconds, record.accept_seconds) >= 0
    assert executor.take_rounds() == []
    assert Executor(ToyEngine()).take_rounds() == []
