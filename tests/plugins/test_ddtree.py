"""Trees and walks: published cases, the reference search, and the definition itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtree.plugins.ddtree import (
    Tree,
    build_tree,
    build_tree_from_top_k,
    chain,
    reference,
    static_tree,
    top_k_log_probs,
)

CASES = json.loads((Path(__file__).parents[1] / "data/golden/ddtree_cases.json").read_text())
# Around the limits of mask words, and none, one and many nodes.
BUDGETS = [0, 1, 16, 31, 32, 33, 63, 64, 65, 128, 129]


def unpacked(tree: Tree) -> NDArray[np.bool_]:
    rows = tree.num_rows
    assert tree.packed_mask.shape == (rows, (rows + 31) // 32)
    assert tree.packed_mask.dtype == np.int32
    as_bytes = tree.packed_mask.astype("<i4").view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little").astype(bool)
    assert not bits[:, rows:].any()
    return bits[:, :rows]


def assert_same(tree: Tree, expected: reference.ReferenceTree) -> None:
    assert tree.token_ids.tolist() == expected.token_ids
    assert tree.depths.tolist() == expected.depths
    assert tree.parents.tolist() == expected.parents
    assert tree.log_probs.tolist() == expected.log_probs
    assert np.array_equal(unpacked(tree), reference.attends(expected.parents))


@st.composite
def ranked(draw: st.DrawFn, *, max_depth: int = 6, max_k: int = 8) -> NDArray[np.float32]:
    """Log-probs [depth, k] with many exact ties, steps of 1/4, some ranks forbidden."""
    depth = draw(st.integers(0, max_depth))
    k = draw(st.integers(1, max_k))
    steps = st.one_of(st.integers(0, 2), st.just(0), st.just(1_000_000))
    rows = [draw(st.lists(steps, min_size=k, max_size=k)) for _ in range(depth)]
    log_probs = -np.cumsum(np.array(rows, np.float32).reshape(depth, k), axis=1) / 4
    log_probs[log_probs <= -250_000] = -np.inf
    return log_probs.astype(np.float32)


def distinct_ids(log_probs: NDArray[np.float32]) -> NDArray[np.int32]:
    """Token 0 among them, none in rank order."""
    depth, k = log_probs.shape
    return (np.arange(depth * k, dtype=np.int32) * 7 % max(depth * k, 1)).reshape(depth, k)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['seed']}-{c['kind']}-{c['budget']}")
def test_published_cases(case: dict[str, list[int]]) -> None:
    logits = np.array(case["logits"], np.float32)
    tree = build_tree(logits, case["budget"])
    assert tree.token_ids.tolist() == case["node_token_ids"]
    assert tree.depths.tolist() == case["node_depths"]
    assert tree.parents.tolist() == case["parents"]
    assert tree.packed_mask.tolist() == case["packed_mask"]
    accepted, bonus = tree.walk(case["posterior"])
    assert accepted.tolist() == case["accepted"]
    assert bonus == case["next_token"]


@settings(deadline=None)
@given(ranked(), st.sampled_from(BUDGETS))
def test_ties_equal_the_reference(log_probs: NDArray[np.float32], budget: int) -> None:
    ids = distinct_ids(log_probs)
    tree = build_tree_from_top_k(log_probs, ids, budget)
    assert_same(tree, reference.build_tree(log_probs, ids, budget))


@settings(deadline=None)
@given(ranked(max_depth=3, max_k=4), st.integers(0, 100))
def test_the_most_probable_prefixes(log_probs: NDArray[np.float32], budget: int) -> None:
    ids = distinct_ids(log_probs)
    best = reference.best_prefixes(log_probs, budget)
    assert reference.build_tree(log_probs, ids, budget).paths == best
    tree = build_tree_from_top_k(log_probs, ids, budget)
    assert tree.token_ids.tolist() == [int(ids[len(p) - 1, p[-1]]) for p in best]
    assert tree.depths.tolist() == [len(p) for p in best]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 15), st.integers(1, 300), st.sampled_from(BUDGETS))
def test_random_logits_equal_the_reference(seed: int, depth: int, vocab: int, budget: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (depth, vocab)).astype(np.float32)
    tree = build_tree(logits, budget)
    k = max(1, min(budget, vocab))
    log_probs, ids = top_k_log_probs(logits, k)
    assert_same(tree, reference.build_tree(log_probs, ids, budget))
    assert len(tree.token_ids) == min(budget, sum(vocab**d for d in range(1, depth + 1)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(BUDGETS))
def test_flat_logits_are_all_ties(seed: int, budget: int) -> None:
    """Every comparison is decided by rank paths."""
    rng = np.random.default_rng(seed)
    log_probs = np.full((rng.integers(1, 16), rng.integers(1, 12)), rng.choice([0, -1]), np.float32)
    ids = distinct_ids(log_probs)
    assert_same(
        build_tree_from_top_k(log_probs, ids, budget),
        reference.build_tree(log_probs, ids, budget),
    )


@settings(deadline=None)
@given(ranked(), st.sampled_from(BUDGETS), st.integers(0, 140))
def test_a_chain_seed_comes_first(
    log_probs: NDArray[np.float32], budget: int, smaller: int
) -> None:
    ids = distinct_ids(log_probs)
    tree = build_tree_from_top_k(log_probs, ids, budget, chain_seed=True)
    expected = reference.build_tree(log_probs, ids, budget, chain_seed=True)
    assert_same(tree, expected)
    likely = np.flatnonzero(np.append(np.isneginf(log_probs[:, 0]), True))[0]
    seed = min(int(likely), budget)
    assert expected.paths[:seed] == [(0,) * d for d in range(1, seed + 1)]
    # The rest is the best there is beside the chain, and a prefix is the smaller tree.
    others = [path for path in reference.best_prefixes(log_probs[:3, :4], 400) if any(path)]
    if log_probs.shape[0] <= 3 and log_probs.shape[1] <= 4:
        assert expected.paths[seed:] == others[: budget - seed]
    assert_same(
        tree.first(smaller),
        reference.build_tree(log_probs, ids, min(smaller, budget), chain_seed=True),
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 15), st.sampled_from(BUDGETS))
def test_a_chain_seed_from_logits(seed: int, depth: int, budget: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (depth, 300)).astype(np.float32)
    tree = build_tree(logits, budget, chain_seed=True)
    log_probs, ids = top_k_log_probs(logits, max(1, budget))
    assert_same(tree, reference.build_tree(log_probs, ids, budget, chain_seed=True))
    spine = min(depth, budget)
    assert tree.token_ids[:spine].tolist() == logits.argmax(axis=1)[:spine].tolist()


@given(st.integers(0, 2**32 - 1), st.integers(0, 70), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_first_nodes_are_the_smaller_tree(seed: int, nodes: int, chain_seed: bool) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (5, 40)).astype(np.float32)
    tree = build_tree(logits, 64, top_k=40, chain_seed=chain_seed)
    smaller = build_tree(logits, min(nodes, 64), top_k=40, chain_seed=chain_seed)
    cut = tree.first(nodes)
    for field in ("token_ids", "depths", "parents", "log_probs", "packed_mask"):
        assert np.array_equal(getattr(cut, field), getattr(smaller, field)), field
    assert tree.num_rows == 65


@pytest.mark.parametrize(
    ("log_probs", "order"),
    [
        # t = 5 / 2^54. (0, 1) sums to -t - 1.75 + 1.75 - 2.5 = -2.5 and ties with (1, 0);
        # summed from its parent it would come later, since -t - 2.5 rounds down.
        ([[-5 * 2.0**-54, -0.75], [-1.75, -2.5]], [(0, 1), (1, 0)]),
        # t = 1 / 2^51. (0, 1) sums to -1 - t + 1 - 3.5 < -3.5 and comes after (1, 0); with
        # the addition before the subtraction t would be lost, and they would tie.
        ([[-(2.0**-51), -2.5], [-1, -3.5]], [(1, 0), (0, 1)]),
    ],
)
def test_order_of_additions(log_probs: list[list[float]], order: list[tuple[int, int]]) -> None:
    array = np.array(log_probs, np.float32)
    ids = distinct_ids(array)
    expected = reference.build_tree(array, ids, 6)
    assert expected.paths[3:5] == order
    assert_same(build_tree_from_top_k(array, ids, 6), expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 15), st.sampled_from(BUDGETS))
@settings(max_examples=40, deadline=None)
def test_invariants(seed: int, depth: int, budget: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (depth, 50)).astype(np.float32)
    tree = build_tree(logits, budget)
    smaller = build_tree(logits, budget // 2)
    n = len(tree.token_ids)
    assert tree.token_ids.shape == tree.depths.shape == (n,)
    assert tree.parents.shape == (n + 1,)
    assert tree.parents[0] == -1
    assert (tree.parents[1:] < np.arange(1, n + 1)).all()
    depths = np.array([0, *tree.depths])
    assert (depths[1:] == depths[tree.parents[1:]] + 1).all()  # prefix-closed
    siblings = list(zip(tree.parents[1:].tolist(), tree.token_ids.tolist(), strict=True))
    assert len(set(siblings)) == n
    # A larger budget only adds nodes at the end.
    assert smaller.token_ids.tolist() == tree.token_ids[: len(smaller.token_ids)].tolist()


def test_top_k_limits_the_ranks() -> None:
    logits = np.zeros((2, 9), np.float32)
    assert build_tree(logits, 20, top_k=2).token_ids.tolist() == [0, 1, 0, 1, 0, 1]
    chain_like = build_tree(logits, 20, top_k=1)
    assert chain_like.parents.tolist() == [-1, 0, 1]
    # More ranks than the vocabulary or the budget has change nothing.
    wide = build_tree(logits, 20, top_k=1000)
    assert wide.token_ids.tolist() == build_tree(logits, 20).token_ids.tolist()


@pytest.mark.parametrize(("depth", "vocab", "budget"), [(0, 5, 4), (3, 5, 0), (0, 1, 0)])
def test_root_only(depth: int, vocab: int, budget: int) -> None:
    tree = build_tree(np.zeros((depth, vocab), np.float32), budget)
    assert tree.parents.tolist() == [-1]
    assert tree.packed_mask.tolist() == [[1]]
    assert tree.token_ids.size == tree.depths.size == 0
    accepted, bonus = tree.walk([3])
    assert (accepted.tolist(), bonus) == ([0], 3)


def test_one_word_vocabulary_is_a_chain() -> None:
    tree = build_tree(np.full((4, 1), -3, np.float32), 100)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_budget_beyond_all_prefixes() -> None:
    tree = build_tree(np.zeros((3, 2), np.float32), 1000)
    assert len(tree.token_ids) == 2 + 4 + 8


def test_forbidden_tokens_are_never_drafted() -> None:
    logits = np.full((3, 6), -np.inf, np.float32)
    logits[:, 4] = 1
    logits[1, 2] = 0
    tree = build_tree(logits, 64)
    assert tree.token_ids.tolist() == [4, 4, 4, 2, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 4]


def test_token_zero_is_a_token() -> None:
    logits = np.full((3, 6), -5, np.float32)
    logits[:, 0] = 5
    tree = build_tree(logits, 3)
    assert tree.token_ids.tolist() == [0, 0, 0]
    assert tree.walk([0, 0, 0, 9])[0].tolist() == [0, 1, 2, 3]


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_walk_of_random_choices(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    tree = build_tree(rng.normal(0, 2, (5, 4)).astype(np.float32), budget)
    choices = rng.integers(0, 5, tree.num_rows)
    accepted, bonus = tree.walk(choices)
    expected = reference.walk(tree.token_ids.tolist(), tree.parents.tolist(), choices.tolist())
    assert (accepted.tolist(), bonus) == expected
    assert accepted.dtype == np.int32
    assert isinstance(bonus, int)


def test_walk_takes_the_first_of_equal_siblings() -> None:
    tree = static_tree([[0], [1], [0, 0], [1, 0]], np.array([[7, 7], [8, 9]]))
    accepted, bonus = tree.walk([7, 8, 8, 1, 2])
    assert (accepted.tolist(), bonus) == ([0, 1, 3], 1)


def test_chain() -> None:
    tree = chain([5, 0, 9])
    assert tree.token_ids.tolist() == [5, 0, 9]
    assert tree.depths.tolist() == [1, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.packed_mask.tolist() == [[1], [3], [7], [15]]
    assert tree.walk([5, 0, 1, 4])[0].tolist() == [0, 1, 2]
    assert chain([]).parents.tolist() == [-1]


def test_static_tree_has_the_shape_of_its_choices() -> None:
    ids = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    tree = static_tree([(2,), (0, 1), (0,), (0, 1, 2), (2, 0)], ids)
    assert tree.token_ids.tolist() == [10, 12, 21, 20, 32]
    assert tree.depths.tolist() == [1, 1, 2, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [0, 0], [0, 0, 0]], r"choice \[0, 0, 0\].*depth"),
        ([[0], [2]], r"choice \[2\]: rank 2"),
        ([[-1]], r"choice \[-1\]: rank -1"),
        ([[]], r"choice \[\]"),
        ([[0], [1], [0]], r"choice \[0\] is there twice"),
        ([[0], [1, 0]], r"choice \[1, 0\] has no parent: choice \[1\] is missing"),
    ],
)
def test_static_tree_refuses(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        static_tree(choices, np.zeros((2, 2), np.int32))


def test_torch_tensors_are_taken() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    tree = build_tree(logits, 12)
    assert tree.token_ids.tolist() == build_tree(logits.numpy(), 12).token_ids.tolist()
    assert tree.walk(torch.zeros(13, dtype=torch.int64))[1] == 0


def test_results_outlive_the_tree() -> None:
    token_ids = build_tree(np.eye(3, 4, dtype=np.float32), 9).token_ids
    assert token_ids.shape == (9,)
    assert not token_ids.flags.writeable


GOOD = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_tree(GOOD[0], 3), r"\[depth, vocab\].*\(4,\)"),
        (lambda: build_tree(GOOD.astype(np.float64), 3), "float32, not float64"),
        (lambda: build_tree(torch.zeros(2, 4, dtype=torch.bfloat16), 3), "logits cannot be read"),
        (lambda: build_tree(np.zeros((2, 0), np.float32), 3), "no vocabulary"),
        (lambda: build_tree(GOOD, -1), "budget must be from 0"),
        (lambda: build_tree(GOOD, 2**31), "budget must be from 0"),
        (lambda: build_tree(GOOD, 3, top_k=0), "top_k must be from 1"),
        (lambda: build_tree(GOOD, 3, num_threads=0), "num_threads must be from 1"),
        (lambda: build_tree_from_top_k(GOOD, np.zeros((2, 3), int), 3), "differ in shape"),
        (lambda: build_tree_from_top_k(GOOD, GOOD, 3), "token_ids must be integers"),
        (lambda: build_tree_from_top_k(GOOD, np.full((2, 4), 2**31), 3), "fit in int32"),
        (lambda: build_tree_from_top_k(GOOD, np.zeros((2, 4), int), -1), "budget must be"),
        (
            lambda: build_tree_from_top_k(GOOD[:, :0], np.zeros((2, 0), int), 3),
            "top_k must be at least 1",
        ),
        (
            lambda: build_tree_from_top_k(np.array([[0, 1]], np.float32), [[1, 2]], 3),
            "depth 0, rank 1.*must not increase",
        ),
        (
            lambda: build_tree_from_top_k(np.array([[0], [np.nan]], np.float32), [[1], [2]], 3),
            "depth 1, rank 0: nan",
        ),
        (
            lambda: build_tree_from_top_k(np.array([[np.inf]], np.float32), [[1]], 3),
            "depth 0, rank 0: inf",
        ),
        (lambda: build_tree(GOOD, 3).walk([0, 0, 0]), "3 values for a tree of 4 rows"),
        (lambda: build_tree(GOOD, 3).walk([[0, 0, 0, 0]]), r"choices must be \[n \+ 1\]"),
        (lambda: build_tree(GOOD, 3).walk([0.0, 0.0, 0.0, 0.0]), "choices must be integers"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
