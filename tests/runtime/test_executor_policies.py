"""Budget policies in the executor: they change how much is drafted, and no token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding import run
from toy_engine import ToyEngine, decode
from trtree import _core
from trtree.runtime.executor import (
    BudgetPolicy,
    DecodingMode,
    Executor,
    ExecutorConfig,
    Request,
    SpeculativeConfig,
    TreeKind,
)

DRAFT = [(1.0, 0.5), (8.0, 0.5)]
# Rows that cost nothing more, and rows that cost as much as a whole pass each.
SOME_ROWS = _core.CostModel([(1.0, 10.0), (512.0, 400.0)], DRAFT, 0.0)
FREE_ROWS = _core.CostModel([(1.0, 10.0), (512.0, 10.0)], DRAFT, 0.0)
DEAR_ROWS = _core.CostModel([(1.0, 10.0), (2.0, 20.0), (512.0, 5120.0)], DRAFT, 0.0)


def speculative(
    policy: BudgetPolicy,
    mode: DecodingMode = DecodingMode.TREE,
    budget: int = 16,
    seed: bool = False,
) -> SpeculativeConfig:
    return SpeculativeConfig(mode, TreeKind.DYNAMIC, budget, 0, policy, seed)


configs = st.builds(
    speculative,
    st.sampled_from([BudgetPolicy.FIXED, BudgetPolicy.LOAD, BudgetPolicy.ADAPTIVE]),
    st.sampled_from([DecodingMode.PLAIN, DecodingMode.CHAIN, DecodingMode.TREE]),
    st.sampled_from([0, 1, 7, 16, 64]),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(1, 24), configs
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([FREE_ROWS, DEAR_ROWS]),
    st.sampled_from([0, 1, 20, 200]),
)
def test_no_policy_changes_a_token(
    specs: list[tuple[list[int], int, SpeculativeConfig]], costs: _core.CostModel, load_rows: int
) -> None:
    engine = ToyEngine(max_num_rows=140)
    executor = Executor(engine, ExecutorConfig(cost_model=costs, load_rows=load_rows))
    results = run(executor, [Request(p, n, speculative=c) for p, n, c in specs])
    for (prompt, max_tokens, _), (tokens, _) in zip(specs, results, strict=True):
        assert tokens == decode(prompt, max_tokens, 13)


def nodes_per_round(costs: _core.CostModel, policy: BudgetPolicy, count: int) -> float:
    engine = ToyEngine(max_num_rows=256, max_batch_size=16)
    executor = Executor(engine, ExecutorConfig(cost_model=costs, load_rows=66))
    requests = [
        Request([i % 13], 60, speculative=speculative(policy, budget=32)) for i in range(count)
    ]
    statistics = [last.statistics for _, last in run(executor, requests)]
    rounds = sum(s.verify_forwards for s in statistics)
    return sum(s.drafted_tokens for s in statistics) / rounds


def test_budgets_follow_what_rows_cost() -> None:
    free = nodes_per_round(FREE_ROWS, BudgetPolicy.ADAPTIVE, 1)
    dear = nodes_per_round(DEAR_ROWS, BudgetPolicy.ADAPTIVE, 1)
    assert free > 20
    assert dear < 1


def test_adaptive_trees_share_the_rows_of_a_step() -> None:
    engine = ToyEngine(max_num_rows=20, verify_width=17)  # which refuses more
    executor = Executor(engine, ExecutorConfig(cost_model=FREE_ROWS))
    asked = speculative(BudgetPolicy.ADAPTIVE)
    run(executor, [Request([i], 30, speculative=asked) for i in range(4)])
    assert max(batch.num_rows for batch in engine.batches) == 20


def test_outputs_that_end_early_say_nothing_of_the_nodes_behind() -> None:
    """A stop token is no rejection: the next requests draft as if it had not been."""
    prompts = [[i, 7, i] for i in range(13)]
    drafted = []
    for stopped in (False, True):
        executor = Executor(ToyEngine(), ExecutorConfig(cost_model=SOME_ROWS))
        asked = speculative(BudgetPolicy.ADAPTIVE)
        if stopped:  # at the first token of their first tree
            outputs = [decode(prompt, 2, 13) for prompt in prompts]
            stops = [second for first, second in outputs if first != second]
            assert len(stops) > 8
            for prompt, (first, second) in zip(prompts, outputs, strict=True):
                if first != second:
                    run(executor, [Request(prompt, 30, [second], speculative=asked)])
        before = executor.latest_statistics().drafted_tokens
        run(executor, [Request([5], 12, speculative=asked)])
        drafted.append(executor.latest_statistics().drafted_tokens - before)
    assert drafted[0] == drafted[1] > 0


def test_budgets_fall_with_the_number_of_requests() -> None:
    """Pitfall 24: rows stop being free in a batch."""
    falling = [nodes_per_round(FREE_ROWS, BudgetPolicy.LOAD, n) for n in (1, 4, 8, 16)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 8 * falling[-1] > 0


def test_an_adaptive_request_needs_measured_costs() -> None:
    executor = Executor(ToyEngine())
    with pytest.raises(ValueError, match=r"policy adaptive .* trtree\.runtime\.calibrate"):
        executor.enqueue_request(Request([1], speculative=speculative(BudgetPolicy.ADAPTIVE)))
    with pytest.raises(ValueError, match="policy adaptive cuts dynamic trees"):
        static = SpeculativeConfig(tree=TreeKind.STATIC, policy=BudgetPolicy.ADAPTIVE)
        Executor(ToyEngine(), ExecutorConfig(cost_model=FREE_ROWS)).enqueue_request(
            Request([1], speculative=static)
        )
