"""When drafting does not pay at the load there is, nobody keeps the drafter's context; when the
load falls, requests draft again, those that were running too. No token changes by that.

Counts, not times: the costs are made up, and the toy engine refuses to draft from a drafter's
context with a hole.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import run
from engines import DEMO_PROMPTS
from toy_engine import ToyEngine, decode
from trtree import _core
from trtree._core.tree_policy import AdaptiveBudget
from trtree.runtime.executor import (
    BudgetPolicy,
    CapacitySchedulerPolicy,
    DecodingMode,
    Executor,
    ExecutorConfig,
    ExecutorStatistics,
    KvCacheConfig,
    Request,
    SchedulerConfig,
    SpeculativeConfig,
    TreeKind,
)
from trtree.runtime.session import Session

DRAFT = [(1.0, 0.02), (64.0, 1.28)]
EXTEND = [(1.0, 0.005), (64.0, 0.32)]
# Six rows cost what one does, further ones a tenth each: drafting pays for a request alone. In
# a crowd it would if more were accepted than is.
SIX_FREE = _core.CostModel([(1.0, 1.0), (6.0, 1.0), (516.0, 52.0)], DRAFT, 0.0, EXTEND)
# A second row costs a pass: not even a chain that is accepted to its end would pay.
NONE_FREE = _core.CostModel([(1.0, 1.0), (512.0, 512.0)], DRAFT, 0.0, EXTEND)

ADAPTIVE = SpeculativeConfig(DecodingMode.TREE, TreeKind.DYNAMIC, 8, policy=BudgetPolicy.ADAPTIVE)


def executor_of(engine: ToyEngine, costs: _core.CostModel = SIX_FREE) -> Executor:
    return Executor(engine, ExecutorConfig(cost_model=costs, record_rounds=True))


def crowd(count: int, max_tokens: int = 40) -> list[Request]:
    return [
        Request([i % 13, i // 13 % 13, i // 169], max_tokens, speculative=ADAPTIVE)
        for i in range(count)
    ]


def big_engine(**options: int) -> ToyEngine:
    return ToyEngine(max_batch_size=32, num_pages=2000, **options)


def outputs(executor: Executor, ids: list[int]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while responses := executor.await_responses():
        for response in responses:
            tokens[response.request_id] += response.token_ids
    return list(tokens.values())


def since(executor: Executor, before: ExecutorStatistics) -> tuple[int, int]:
    """Passes of the drafter, and tokens that extended its context."""
    now = executor.latest_statistics()
    return (
        now.drafter_forwards - before.drafter_forwards,
        now.extended_tokens - before.extended_tokens,
    )


def test_where_no_draft_could_pay_the_drafter_is_left_alone() -> None:
    engine = big_engine()
    executor = executor_of(engine, NONE_FREE)
    run(executor, crowd(64))
    statistics = executor.latest_statistics()
    assert statistics.output_tokens == 64 * 40
    assert (statistics.drafter_forwards, statistics.extended_tokens) == (0, 0)
    assert not any(record.extends_drafter for record in executor.take_rounds())


def test_a_crowd_decodes_plainly_once_the_drafter_is_known() -> None:
    """Learnt from 32 trees, given up for good some rounds later, and then tried by single
    requests that take 1% of the time."""
    engine = big_engine()
    executor = executor_of(engine)
    run(executor, crowd(1, 150))  # learns, one tree at a time; here drafting pays
    learnt = executor.latest_statistics()
    assert learnt.drafter_forwards > 15
    executor.take_rounds()

    run(executor, crowd(32))
    assert since(executor, learnt) == (0, 0)
    settled = executor.latest_statistics()
    executor.take_rounds()
    run(executor, crowd(32 * 8))
    drafts, _ = since(executor, settled)
    records = executor.take_rounds()
    rounds = len({record.round for record in records})
    trees = sum(len(record.token_ids) > 1 for record in records if not record.prefill)
    probes = rounds / AdaptiveBudget.PROBE_INTERVAL
    assert 0 < drafts <= AdaptiveBudget.PROBE_TREES * probes < 0.13 * rounds
    assert drafts == trees  # by one request at a time
    extended = {record.request_id for record in records if record.extends_drafter}
    assert 1 <= len(extended) <= probes


def test_the_first_request_after_a_crowd_drafts() -> None:
    engine = big_engine()
    executor = executor_of(engine)
    run(executor, crowd(1, 150))
    before = executor.latest_statistics()
    for (tokens, _), request in zip(run(executor, crowd(32)), crowd(32), strict=True):
        assert tokens == decode(request.prompt_token_ids, 40, 13)
    assert since(executor, before)[0] == 0
    before = executor.latest_statistics()
    ((_, last),) = run(executor, crowd(1))
    drafted, extended = since(executor, before)
    assert drafted >= last.statistics.verify_forwards - 1  # the last token needs no draft
    assert extended == 3 + 40 - 1 - last.statistics.cached_tokens
    assert last.statistics.acceptance_length > 1.5


@pytest.mark.parametrize("reuse", [True, False])
def test_a_request_that_ran_through_a_crowd_drafts_again(reuse: bool) -> None:
    engine = big_engine()
    config = ExecutorConfig(
        cost_model=SIX_FREE,
        kv_cache_config=KvCacheConfig(enable_block_reuse=reuse),
        record_rounds=True,
    )
    executor = Executor(engine, config)
    long = Request([7], 400, speculative=ADAPTIVE)
    first = executor.enqueue_request(long)
    tokens: list[int] = []
    while len(tokens) < 150:  # alone: it learns, and drafts
        tokens += [t for r in executor.await_responses() for t in r.token_ids]
    alone = executor.latest_statistics()
    executor.take_rounds()
    others = [executor.enqueue_request(request) for request in crowd(31)]
    rest = outputs(executor, [first, *others])
    tokens += rest[0]
    assert tokens == decode([7], 400, 13)
    records = executor.take_rounds()
    own = [record for record in records if record.request_id == first]
    lapsed = [record for record in own if not record.extends_drafter]
    rerun = [record for record in own if record.prefill]
    now = executor.latest_statistics()
    assert now.drafter_catch_ups == 1
    assert now.preemptions == 0
    assert now.prompt_tokens == alone.prompt_tokens + 31 * 3  # a catch-up is no new prompt
    assert len(lapsed) > 10
    # Only what was committed without the drafter, and the rest of the page it began in.
    missing = sum(len(record.accepted) for record in lapsed)
    committed = lapsed[-1].committed_length + len(lapsed[-1].accepted)
    again = sum(len(record.token_ids) for record in rerun)
    assert (missing <= again < missing + engine.c.page_size) if reuse else again == committed
    after = own[own.index(rerun[-1]) + 1 :]
    assert all(record.extends_drafter for record in after)
    assert sum(record.tree_budget for record in after) / len(after) > 3


def test_a_request_near_its_end_does_not_run_again() -> None:
    engine = big_engine()
    executor = executor_of(engine)
    run(executor, crowd(1, 150))
    before = executor.latest_statistics()
    long = executor.enqueue_request(Request(list(range(12)) * 8, 46, speculative=ADAPTIVE))
    rest = [executor.enqueue_request(request) for request in crowd(31)]
    tokens = outputs(executor, [long, *rest])[0]
    assert tokens == decode(list(range(12)) * 8, 46, 13)
    assert executor.latest_statistics().drafter_catch_ups == 0
    assert since(executor, before)[0] == 0


def test_a_context_that_caught_up_is_the_one_that_never_lapsed(
    demo_engine: Callable[..., Path],
) -> None:
    """On the CPU engine: the same trees at the same tokens, and so the same KV, to the bit."""
    session = Session(demo_engine(), num_threads=1)
    prompts = [session.tokenizer.encode(text) for text in DEMO_PROMPTS[:2]]
    fixed = SpeculativeConfig(tree_budget=ADAPTIVE.tree_budget)
    plain = SpeculativeConfig(DecodingMode.PLAIN)

    def decoded(request: Request) -> tuple[list[int], dict[int, list[int]]]:
        """By itself: its tokens, and its trees by the tokens before them."""
        executor = Executor(session.engine, ExecutorConfig(record_rounds=True))
        ((tokens, _),) = run(executor, [request])
        records = [record for record in executor.take_rounds() if not record.prefill]
        return tokens, {record.committed_length: record.token_ids for record in records}

    expected, trees = decoded(Request(prompts[0], 200, speculative=fixed))
    executor = executor_of(session.engine)
    first = executor.enqueue_request(Request(prompts[0], 200, speculative=ADAPTIVE))
    tokens: list[int] = []
    while len(tokens) < 80:  # it learns
        tokens += [t for r in executor.await_responses() for t in r.token_ids]
    others = [Request(prompts[1], 40, speculative=ADAPTIVE) for _ in range(7)]
    ids = [executor.enqueue_request(request) for request in others]
    long, *short = outputs(executor, [first, *ids])
    assert tokens + long == expected == decoded(Request(prompts[0], 200, speculative=plain))[0]
    assert short == [decoded(Request(prompts[1], 40, speculative=plain))[0]] * 7
    assert executor.latest_statistics().drafter_catch_ups > 0
    own = [record for record in executor.take_rounds() if record.request_id == first]
    rerun = max(i for i, record in enumerate(own) if record.prefill)
    after = [record for record in own[rerun + 1 :] if record.committed_length in trees]
    assert sum(len(record.token_ids) - 1 for record in after) > 20
    for record in after:
        whole = trees[record.committed_length]
        assert record.token_ids == whole[: len(record.token_ids)]


bursts = st.lists(
    st.tuples(
        st.integers(0, 60),  # rounds after the one before
        st.integers(1, 10),  # requests
        st.lists(st.integers(0, 3), min_size=1, max_size=20),
        st.sampled_from([1, 20, 40, 140]),
        st.sampled_from([ADAPTIVE, ADAPTIVE, SpeculativeConfig(DecodingMode.PLAIN)]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30, deadline=None)
@given(
    bursts,
    st.sampled_from([1, 4]),
    st.sampled_from([200, 400, 2000]),
    st.sampled_from(list(CapacitySchedulerPolicy)),
    st.booleans(),
    st.sampled_from([None, None, 0, 3, 60]),
)
def test_no_token_changes_as_loads_come_and_go(
    bursts: list[tuple[int, int, list[int], int, SpeculativeConfig]],
    page_size: int,
    pool_tokens: int,
    policy: CapacitySchedulerPolicy,
    reuse: bool,
    snapshots: int | None,
) -> None:
    """Prompts share beginnings, and pools are small: with lapses, catch-ups, pre-emptions and
    pages with and without the drafter's keys, all at once; with recurrent state too."""
    engine = ToyEngine(
        page_size=page_size, num_pages=pool_tokens // page_size, state_snapshots=snapshots
    )
    config = ExecutorConfig(
        cost_model=SIX_FREE,
        kv_cache_config=KvCacheConfig(enable_block_reuse=reuse, snapshot_interval=4),
        scheduler_config=SchedulerConfig(policy),
    )
    executor = Executor(engine, config)
    run(executor, crowd(1, 100))  # learns
    expected, tokens = {}, dict[int, list[int]]()

    def go_on(rounds: float) -> None:
        while rounds > 0 and (responses := executor.await_responses()):
            for response in responses:
                tokens[response.request_id] += response.token_ids
            rounds -= 1

    for wait, count, prompt, max_tokens, speculative in bursts:
        go_on(wait)
        for index in range(count):
            own = [*prompt, index]
            request = Request(own, max_tokens, speculative=speculative)
            request_id = executor.enqueue_request(request)
            expected[request_id], tokens[request_id] = decode(own, max_tokens, 13), []
    go_on(float("inf"))
    assert tokens == expected
    after = executor.latest_statistics()
    assert after.free_pages + after.cached_pages == after.total_pages
