"""Tree policies: budgets by load, and the adaptive budget against exhaustive choices."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtree import _core
from trtree._core import CostModel
from trtree._core.tree_policy import (
    AdaptiveBudget,
    Phase,
    RoundLoad,
    default_load_rows,
    under_load,
)
from trtree.plugins.ddtree import Tree, build_tree_from_top_k
from trtree.runtime.executor import DecodingMode, SpeculativeConfig, TreeKind

Points = list[tuple[float, float]]


@st.composite
def measured(draw: st.DrawFn) -> Points:
    gaps = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    sizes = np.cumsum(gaps).tolist()
    seconds = draw(st.lists(st.floats(0.01, 10), min_size=len(sizes), max_size=len(sizes)))
    return list(zip(sizes, seconds, strict=True))


@given(measured())
def test_costs_never_fall_and_are_convex(points: Points) -> None:
    costs = CostModel(points)
    curve = np.array([costs.verify_seconds(size) for size in range(1, int(points[-1][0]) + 30)])
    steps = np.diff(curve)
    assert (steps >= -1e-9).all()
    inside = steps[int(points[0][0]) - 1 :]
    assert (np.diff(inside) >= -1e-9).all()
    assert curve.min() >= min(seconds for _, seconds in points) - 1e-9
    assert curve[int(points[-1][0]) - 1] <= max(seconds for _, seconds in points) + 1e-9


@given(measured())
def test_convex_measurements_are_kept(points: Points) -> None:
    sizes = [size for size, _ in points]
    convex = [(size, 0.5 + 0.01 * size + 0.002 * size**2) for size in sizes]
    costs = CostModel(convex, [(1, 0.25)], 1e-6)
    for size, seconds in convex:
        assert costs.verify_seconds(size) == pytest.approx(seconds, rel=1e-12)
        assert costs.verify_seconds(size, 1000) == pytest.approx(seconds + size * 1e-3, rel=1e-12)
    assert costs.draft_seconds(7) == 0.25
    assert costs.verify_seconds(0) == costs.draft_seconds(0) == costs.extend_seconds(8) == 0
    assert CostModel(convex).draft_seconds(3) == 0


@pytest.mark.parametrize(
    "points", [[(0, 1.0)], [(2, 1.0), (2, 1.0)], [(1, 0.0)], [(1, float("nan"))], [(3, -1.0)]]
)
def test_impossible_measurements_are_refused(points: Points) -> None:
    with pytest.raises(ValueError, match="sizes must be at least 1 and increase"):
        CostModel(points)
    with pytest.raises(ValueError, match="needs the cost of verifying"):
        AdaptiveBudget(CostModel([], [(1, 1.0)]))


def capabilities(
    block_size: int = 8, verify_width: int = 65, rows: int = 512
) -> _core.Capabilities:
    c = _core.Capabilities()
    c.block_size, c.verify_width, c.max_num_rows = block_size, verify_width, rows
    return c


def nodes_of(config: SpeculativeConfig, c: _core.Capabilities) -> int:
    if config.mode == DecodingMode.PLAIN:
        return 0
    chain = max(0, min(c.block_size, c.verify_width) - 1)
    return chain if config.mode == DecodingMode.CHAIN else config.tree_budget


@settings(deadline=None)
@given(
    st.sampled_from(list(DecodingMode)),
    st.sampled_from(list(TreeKind)),
    st.integers(0, 64),
    st.integers(1, 400),
    st.integers(1, 16),
)
def test_load_lowers_budgets_to_chain_and_plain(
    mode: DecodingMode, kind: TreeKind, budget: int, max_rows: int, block_size: int
) -> None:
    c = capabilities(block_size)
    config = SpeculativeConfig(mode, kind, budget)
    previous = nodes_of(config, c)
    for requests in range(1, 420):
        smaller = under_load(config, c, requests, max_rows)
        nodes = nodes_of(smaller, c)
        assert nodes <= previous
        assert nodes == 0 or requests * (1 + nodes) <= max_rows
        assert requests * (2 + nodes) > max_rows or nodes == nodes_of(
            config, c
        )  # no less than fits
        if nodes == nodes_of(config, c):
            assert smaller.mode == config.mode or nodes == 0
        elif nodes > 0:
            assert smaller.mode == DecodingMode.TREE
            assert smaller.tree == TreeKind.DYNAMIC
            is_chain = smaller.chain_seed and smaller.top_k == 1
            assert is_chain == (nodes <= block_size - 1)
        previous = nodes
    assert previous == 0


def test_rows_without_a_configured_limit() -> None:
    c = capabilities(verify_width=17)
    assert default_load_rows(c) == 34
    assert default_load_rows(capabilities(rows=20, verify_width=17)) == 20
    config = SpeculativeConfig(tree_budget=16)
    for requests, nodes in [(1, 16), (2, 16), (3, 10), (4, 7), (17, 1), (18, 0)]:
        assert nodes_of(under_load(config, c, requests, default_load_rows(c)), c) == nodes


def drafted(rng: np.random.Generator, budget: int, depth: int = 4, k: int = 6) -> Tree:
    logits = np.sort(rng.normal(0, rng.uniform(0.5, 4), (depth, k)))[:, ::-1]
    log_probs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    ids = np.tile(np.arange(k, dtype=np.int32), (depth, 1))
    return build_tree_from_top_k(log_probs, ids, budget, chain_seed=bool(rng.integers(2)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 0, 3, 40]))
def test_no_other_prefixes_bring_more(seed: int, other_rows: int) -> None:
    """Against every combination of budgets, for best-first trees and chain seeds."""
    rng = np.random.default_rng(seed)
    trees = [drafted(rng, int(rng.integers(0, 9)), depth=3) for _ in range(rng.integers(1, 4))]
    count = len(trees)
    seconds = np.cumsum(np.cumsum(rng.exponential(1, 80) ** 3))
    costs = CostModel(list(enumerate(1 + seconds, 1)), [(1, rng.exponential(5) + 1e-3)])
    draft, verify = costs.draft_seconds(count), costs.verify_seconds
    worth = [np.concatenate([[0.0], np.cumsum(np.exp(tree.log_probs))]) for tree in trees]

    def tokens(kept: tuple[int, ...]) -> float:
        return count + sum(w[n] for w, n in zip(worth, kept, strict=True))

    every = list(itertools.product(*(range(len(w)) for w in worth)))
    price = max(tokens(kept) / (draft + verify(count + sum(kept))) for kept in every)
    price = max(price, count / verify(count))

    def gain(kept: tuple[int, ...]) -> float:
        return tokens(kept) - price * verify(count + other_rows + sum(kept))

    load = RoundLoad(count, other_rows)
    kept = tuple(AdaptiveBudget(costs).choose(load, [tree._tree for tree in trees]))
    assert gain(kept) == pytest.approx(max(map(gain, every)), abs=1e-9)


def test_a_weak_spine_is_taken_for_the_siblings_behind_it() -> None:
    """Or left with them: nodes are kept from the first on."""
    probs = np.array([[0.5, 0.4, 0.1], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]], np.float32)
    ids = np.tile(np.arange(3, dtype=np.int32), (3, 1))
    seeded = build_tree_from_top_k(np.log(probs), ids, 5, chain_seed=True)
    np.testing.assert_allclose(np.exp(seeded.log_probs), [0.5, 0.05, 0.005, 0.4, 0.1], rtol=1e-6)
    for seconds_per_row, kept in [(0.01, 5), (0.08, 4), (0.15, 1), (0.6, 0)]:
        costs = CostModel([(1, 1.0), (2, 1.0 + seconds_per_row)])
        assert AdaptiveBudget(costs).choose(RoundLoad(1), [seeded._tree]) == [kept]


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_rows_that_are_left_are_not_exceeded(seed: int, max_nodes: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [drafted(rng, 12)._tree for _ in range(3)]
    free = AdaptiveBudget(CostModel([(1, 1.0)]))
    kept = free.choose(RoundLoad(3, max_nodes=max_nodes), trees)
    assert sum(kept) == min(max_nodes, 36)
    assert all(0 <= n <= 12 for n in kept)


def test_a_tree_without_log_probs_is_refused() -> None:
    budget = AdaptiveBudget(CostModel([(1, 1.0)]))
    with pytest.raises(ValueError, match="2 nodes has 0 log_probs"):
        budget.choose(RoundLoad(1), [_core.ddtree.chain(np.array([3, 4], np.int32))])


def test_acceptance_corrects_the_surrogate() -> None:
    rng = np.random.default_rng(4)
    budget = AdaptiveBudget(CostModel([(1, 1.0)]))
    assert budget.correction(3) == 1.0
    half = np.log(np.full((3, 1), 0.5, np.float32))
    tree = build_tree_from_top_k(half, np.zeros((3, 1), np.int32), 3)._tree
    for _ in range(1000):  # accepted with probability 0.75 at each depth, not 0.5
        misses = rng.random(3) >= 0.75
        budget.observe(tree, int(np.argmax(misses)) if misses.any() else 3)
    assert [budget.correction(d) for d in (1, 2, 3)] == pytest.approx(
        [1.5, 1.5**2, 1.5**3], rel=0.25
    )
    assert budget.correction(4) == budget.correction(3)  # never seen
    for _ in range(1000):
        budget.observe(tree, 0)
    assert budget.correction(1) == pytest.approx(0.25)


def uniform(worth: float, depth: int = 3) -> Tree:
    """A chain whose nodes the drafter thinks that likely, each."""
    log_probs = np.log(np.full((depth, 1), worth, np.float32))
    return build_tree_from_top_k(log_probs, np.zeros((depth, 1), np.int32), depth)


def learnt(costs: CostModel, worth: float) -> AdaptiveBudget:
    budget = AdaptiveBudget(costs)
    budget.choose(RoundLoad(1), [uniform(worth)._tree] * 32)
    return budget


def test_drafting_stops_where_it_cannot_pay() -> None:
    load = RoundLoad(1)
    by_rows = AdaptiveBudget(CostModel([(1, 1.0), (2, 2.0)], [(1, 0.5)]))  # whatever is accepted
    assert all(by_rows.phase(load) == Phase.PLAIN for _ in range(200))
    assert not by_rows.probe_due(0.0)

    budget = AdaptiveBudget(CostModel([(1, 1.0), (2, 1.6)], [(1, 0.5)]))
    assert budget.phase(load) == Phase.LEARNING  # nothing is known yet
    assert budget.phase(RoundLoad(1, max_nodes=0)) == Phase.PLAIN
    budget.choose(load, [uniform(0.1)._tree] * 31)
    assert budget.phase(load) == Phase.LEARNING  # little is
    budget.choose(load, [uniform(0.1)._tree])
    assert budget.phase(load) == Phase.PLAIN

    free_rows = CostModel([(1, 1.0), (9, 1.0)], [(1, 0.5)])
    assert learnt(free_rows, 1.0).phase(load) == Phase.DRAFTING
    # The same rows behind a long prompt chunk, or in a large batch, are not free.
    steep = learnt(CostModel([(1, 1.0), (9, 1.0), (100, 80.0)], [(1, 0.5)]), 1.0)
    assert steep.phase(load) == Phase.DRAFTING
    assert steep.pays(load)
    assert not steep.pays(RoundLoad(1, other_rows=60))
    assert steep.phase(RoundLoad(60)) == Phase.PLAIN
    assert steep.phase(load) == Phase.DRAFTING


def test_requests_that_wait_for_a_round_make_it_dear() -> None:
    """A round holds up all that are in work, not only those that draft."""
    budget = learnt(CostModel([(1, 1.0), (8, 1.7), (64, 7.3)], [(1, 0.3)]), 0.9)
    assert budget.pays(RoundLoad(1, other_rows=40))
    assert not budget.pays(RoundLoad(1, other_rows=40, other_requests=7))


def test_the_drafters_context_counts() -> None:
    """Drafting pays for its own pass, but not for the context at every commit."""
    verify, draft = [(1.0, 1.0), (9.0, 1.0)], [(1.0, 0.4)]
    without = learnt(CostModel(verify, draft), 0.5)
    assert without.phase(RoundLoad(1)) == Phase.DRAFTING
    assert without.seconds_saved(RoundLoad(1)) > 0
    extended = learnt(CostModel(verify, draft, 0.0, [(1, 0.3), (9, 2.7)]), 0.5)
    assert extended.phase(RoundLoad(1)) == Phase.PLAIN
    assert extended.seconds_saved(RoundLoad(1)) < 0


def test_seconds_saved_are_those_of_a_token() -> None:
    """A chain of 3, each accepted: 4 tokens in 1.5 seconds instead of 4."""
    budget = learnt(CostModel([(1, 1.0), (9, 1.0)], [(1, 0.5)]), 1.0)
    assert budget.seconds_saved(RoundLoad(1)) == pytest.approx(1 - 1.5 / 4)


def test_a_verdict_does_not_flutter() -> None:
    """It begins to draft for 2% more tokens, and stops where there are fewer."""
    free = [(1.0, 1.0), (9.0, 1.0)]
    tokens = 1 + 0.5 + 0.25 + 0.125

    def phase_after(before: RoundLoad, seconds: float) -> Phase:
        dear = {2.0: 10.0}  # a load at which drafting cannot pay
        costs = CostModel(free, [(1, seconds), *dear.items()])
        budget = learnt(costs, 0.5)
        budget.phase(before)
        return budget.phase(RoundLoad(1))

    for gain, from_plain, from_drafting in [
        (1.03, Phase.DRAFTING, Phase.DRAFTING),
        (1.01, Phase.PLAIN, Phase.DRAFTING),
        (0.99, Phase.PLAIN, Phase.PLAIN),
    ]:
        seconds = tokens / gain - 1
        assert phase_after(RoundLoad(2), seconds) == from_plain
        # A load at which each token's share of the pass is less.
        cheap = learnt(CostModel(free, [(1, seconds)]), 0.5)
        cheap.choose(RoundLoad(1), [uniform(0.9)._tree] * 400)
        assert cheap.phase(RoundLoad(1)) == Phase.DRAFTING
        cheap.choose(RoundLoad(1), [uniform(0.5)._tree] * 4000)
        assert cheap.phase(RoundLoad(1, other_requests=0)) == Phase.DRAFTING  # looked at again:
        phases = [cheap.phase(RoundLoad(1)) for _ in range(20)]
        assert phases[-1] == from_drafting


def test_no_verdict_is_for_ever() -> None:
    """Probes come every so many rounds, or more where they would take above 1% of the time."""
    load = RoundLoad(1)
    budget = learnt(CostModel([(1, 1.0), (2, 1.2)], [(1, 0.5)]), 0.1)

    def rounds_until(seconds: float) -> int:
        for count in range(1, 10_000):
            assert budget.phase(load) == Phase.PLAIN
            if budget.probe_due(seconds):
                budget.begin_probe()
                return count
        raise AssertionError("no probe")

    interval = AdaptiveBudget.PROBE_INTERVAL
    assert [rounds_until(0.1) for _ in range(3)] == [interval] * 3
    assert rounds_until(5.0) == 500
    # Of 8 trees with a row each, and before that of 30 tokens, 20 of which to run again.
    costs = CostModel([(1, 1.0), (101, 11.0)], [(1, 0.5)], 0.0, [(1, 0.01), (100, 1.0)])
    assert AdaptiveBudget.PROBE_TREES == 8
    assert AdaptiveBudget(costs).probe_seconds(load, 20, 30) == pytest.approx(
        2.0 + 0.3 + 8 * (0.5 + 0.1 + 0.01)
    )


def test_what_is_only_tried_verifies_a_node() -> None:
    budget = AdaptiveBudget(CostModel([(1, 1.0), (2, 9.0)]))
    trees = [uniform(0.1)._tree] * 3
    assert budget.choose(RoundLoad(3), trees) == [0, 0, 0]
    assert budget.choose(RoundLoad(3), trees, 1) == [1, 1, 1]
    assert budget.choose(RoundLoad(3, max_nodes=2), trees, 1) == [1, 1, 0]


# Seconds by rows: of a GPU (bound by memory, then by compute), of a CPU, of no limit at all.
SHAPES: dict[str, Callable[[float], float]] = {
    "knee": lambda rows: 10 + 0.02 * rows + 0.25 * max(0, rows - 48),
    "early knee": lambda rows: 4 + 0.05 * rows + 0.5 * max(0, rows - 12),
    "by the row": lambda rows: 1 + rows,
    "flat": lambda rows: 10 + 0.001 * rows,
}


class Simulation:
    """Rounds of requests whose trees and targets are drawn once, for any budget to try.

    ``skew``: the target's distribution is the drafter's to this power, so above 1 paths
    are likelier than the product of marginals says.
    """

    BUDGET = 48

    def __init__(self, rng: np.random.Generator, rounds: int, requests: int, skew: float) -> None:
        self.requests = requests
        self.trees: list[list[Tree]] = []
        self.paths: list[list[NDArray[np.int32]]] = []
        for _ in range(rounds):
            pairs = [self._draft(rng, skew) for _ in range(requests)]
            self.trees.append([tree for tree, _ in pairs])
            self.paths.append([path for _, path in pairs])

    def _draft(self, rng: np.random.Generator, skew: float) -> tuple[Tree, NDArray[np.int32]]:
        sharpness = rng.choice([1.0, 2.0, 4.0, 6.0])
        logits = np.sort(rng.normal(0, sharpness, (7, 12)))[:, ::-1]
        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs /= probs.sum(axis=1, keepdims=True)
        ids = np.tile(np.arange(12, dtype=np.int32), (7, 1))
        tree = build_tree_from_top_k(np.log(probs).astype(np.float32), ids, self.BUDGET)
        truth = probs**skew / (probs**skew).sum(axis=1, keepdims=True)
        said = [int(rng.choice(12, p=row)) for row in truth]
        depths = np.concatenate([[0], tree.depths])
        accepted, _ = tree.walk([said[min(d, 6)] for d in depths])
        return tree, accepted[1:]

    def fixed(self, costs: CostModel, budget: int) -> float:
        """Tokens per second with all trees of one budget; 0 is plain decoding."""
        tokens = sum(1 + int((path <= budget).sum()) for paths in self.paths for path in paths)
        draft = costs.draft_seconds(self.requests) if budget else 0.0
        seconds = draft + costs.verify_seconds(self.requests * (1 + budget))
        return tokens / (seconds * len(self.trees))

    def adaptive(self, costs: CostModel) -> float:
        policy = AdaptiveBudget(costs)
        load = RoundLoad(self.requests)
        tokens, seconds = 0, 0.0
        for trees, paths in zip(self.trees, self.paths, strict=True):
            kept = [0] * self.requests
            if policy.phase(load) != Phase.PLAIN:
                kept = policy.choose(load, [tree._tree for tree in trees])
                seconds += costs.draft_seconds(self.requests)
            for tree, path, nodes in zip(trees, paths, kept, strict=True):
                accepted = int((path <= nodes).sum())
                tokens += 1 + accepted
                if nodes:
                    policy.observe(tree.first(nodes)._tree, accepted)
            seconds += costs.verify_seconds(self.requests + sum(kept))
        return tokens / seconds


def costs_of(shape: str) -> CostModel:
    rows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048]
    return CostModel([(r, SHAPES[shape](r)) for r in rows], [(1, 1.0), (32, 2.0)])


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("skew", [0.7, 1.0, 1.5])
def test_adaptive_is_within_2_percent_of_the_best_budget(requests: int, skew: float) -> None:
    simulation = Simulation(np.random.default_rng(7), 40 + 600 // requests, requests, skew)
    budgets = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    for shape in SHAPES:
        costs = costs_of(shape)
        best = max(simulation.fixed(costs, budget) for budget in budgets)
        assert simulation.adaptive(costs) > 0.98 * best, shape


def test_a_wrong_cost_model_loses() -> None:
    """That the test above can fail: costs that deny the knee."""
    simulation = Simulation(np.random.default_rng(7), 100, 8, 1.0)
    true, denied = costs_of("early knee"), AdaptiveBudget(costs_of("flat"))
    seconds, tokens = 0.0, 0
    for trees, paths in zip(simulation.trees, simulation.paths, strict=True):
        kept = denied.choose(RoundLoad(8), [tree._tree for tree in trees])
        accepted = [int((path <= nodes).sum()) for path, nodes in zip(paths, kept, strict=True)]
        tokens += 8 + sum(accepted)
        seconds += true.draft_seconds(8) + true.verify_seconds(8 + sum(kept))
    assert tokens / seconds < 0.9 * max(simulation.fixed(true, b) for b in (0, 2, 4, 8))


def test_requests_differ_so_adapting_gains() -> None:
    simulation = Simulation(np.random.default_rng(9), 100, 8, 1.0)
    costs = costs_of("knee")
    best = max(simulation.fixed(costs, budget) for budget in range(48))
    assert simulation.adaptive(costs) > 1.05 * best
