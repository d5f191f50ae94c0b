"""The device DDTree, interpreted, against the golden cases and the reference in Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planted import plant
from trtree.plugins.ddtree import device, device_tree, reference

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "ddtree_cases.json"
CPU = torch.device("cpu")
PREFIX, BONUS = 100, 7


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def build(
    log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int, width: int | None = None
) -> device.DeviceTrees:
    trees = device.DeviceTrees.empty(1, width or max(budget, 0) + 1, CPU)
    device.build_trees(
        log_probs[None], token_ids[None], int32(BONUS), int32(PREFIX), int32(budget), trees
    )
    return trees


def assert_equals_reference(log_probs: np.ndarray, token_ids: np.ndarray, budget: int) -> None:
    trees = build(torch.from_numpy(log_probs), torch.from_numpy(token_ids), budget)
    expected = reference.build_tree(log_probs, token_ids, budget)
    rows = int(trees.num_rows)
    assert trees.tokens[0, :rows].tolist() == [BONUS, *expected.token_ids]
    assert trees.parents[0, :rows].tolist() == expected.parents
    assert trees.positions[0, :rows].tolist() == [PREFIX + d for d in (0, *expected.depths)]


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return cases


@pytest.mark.parametrize(
    "case", golden_cases(), ids=lambda c: f"{c['kind']}-{c['depth']}-{c['vocab']}-{c['budget']}"
)
def test_golden(case: dict[str, Any]) -> None:
    logits = np.array(case["logits"], np.float32)
    k = max(1, min(case["budget"], case["vocab"]))
    log_probs, token_ids = (torch.from_numpy(x) for x in reference.top_k_log_probs(logits, k))
    trees = build(log_probs, token_ids, case["budget"])
    rows = len(case["parents"])
    assert trees.num_rows.tolist() == [rows]
    assert trees.tokens[0, :rows].tolist() == [BONUS, *case["node_token_ids"]]
    assert trees.parents[0, :rows].tolist() == case["parents"]
    depths = [0, *case["node_depths"]]
    assert trees.positions[0, :rows].tolist() == [PREFIX + depth for depth in depths]
    words = len(case["packed_mask"][0])
    assert trees.packed_mask[0, :rows, :words].tolist() == case["packed_mask"]


def test_golden_has_trees_past_one_and_two_mask_words() -> None:
    words = {len(case["packed_mask"][0]) for case in golden_cases()}
    assert {1, 2, 3} <= words


@pytest.mark.parametrize("budget", [1, 5, 17, 40])
def test_exact_ties_go_to_the_smaller_rank_path(budget: int) -> None:
    """Every log-prob is the same power of two, so that all paths of a depth tie exactly."""
    log_probs = np.full((4, 3), -0.5, np.float32)
    token_ids = np.arange(12, dtype=np.int32).reshape(4, 3)
    assert_equals_reference(log_probs, token_ids, budget)


def test_ties_between_depths() -> None:
    """Ranks cost 1 or 2, depths 1: paths of different lengths and ranks tie."""
    log_probs = np.array([[-1, -2, -3], [-1, -2, -2], [-1, -1, -3]], np.float32)
    assert_equals_reference(log_probs, np.arange(9, dtype=np.int32).reshape(3, 3), 25)


@pytest.mark.parametrize(
    "log_probs",
    [[[-5 * 2.0**-54, -0.75], [-1.75, -2.5]], [[-(2.0**-51), -2.5], [-1, -3.5]]],
    ids=["from the parent", "addition first"],
)
def test_order_of_additions(log_probs: list[list[float]]) -> None:
    """Summed in any other order, two paths would tie here or stop tying."""
    assert_equals_reference(
        np.array(log_probs, np.float32), np.arange(4, dtype=np.int32).reshape(2, 2), 6
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_with_coarse_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.integers(1, 5, (5, 6)).astype(np.float32) / 4, axis=1)
    token_ids = rng.permutation(1000)[:30].astype(np.int32).reshape(5, 6)
    assert_equals_reference(log_probs, token_ids, int(rng.integers(1, 60)))


def test_forbidden_tokens_are_never_used() -> None:
    log_probs = np.array([[-1, -2, -np.inf], [-1, -np.inf, -np.inf]], np.float32)
    token_ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert_equals_reference(log_probs, token_ids, 20)


@pytest.mark.parametrize(("depth", "budget"), [(0, 5), (3, 0), (3, -1), (1, 4), (1, 2)])
def test_edges(depth: int, budget: int) -> None:
    log_probs = np.tile(np.array([-0.1, -2, -3], np.float32), (depth, 1))
    assert_equals_reference(log_probs, np.tile(np.arange(3, dtype=np.int32), (depth, 1)), budget)


def test_a_batch_with_budgets_and_unused_rows() -> None:
    """Each request by its own marginals, prefix and budget; rows past a tree see themselves."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 4, 10)).astype(np.float32)
    tops = [reference.top_k_log_probs(rows, 6) for rows in logits]
    log_probs, token_ids = (torch.from_numpy(np.stack(x)) for x in zip(*tops, strict=True))
    budgets, prefixes, bonus = (12, 0, 33), (5, 50, 500), (1, 2, 3)
    trees = device.DeviceTrees.empty(3, 35, CPU)
    trees.packed_mask.fill_(-1)  # as another round would leave it
    device.build_trees(
        log_probs, token_ids, int32(*bonus), int32(*prefixes), int32(*budgets), trees
    )
    for index, budget in enumerate(budgets):
        expected = reference.build_tree(*tops[index], budget)
        rows = budget + 1
        assert int(trees.num_rows[index]) == rows
        assert trees.parents[index].tolist() == expected.parents + [-1] * (35 - rows)
        assert trees.tokens[index, 0] == bonus[index]
        assert trees.tokens[index, 1:rows].tolist() == expected.token_ids
        assert (trees.positions[index, rows:] == prefixes[index]).all()
        sees = np.eye(35, dtype=bool)
        sees[:rows, :rows] = reference.attends(expected.parents)
        words = trees.packed_mask[index].numpy().view(np.uint32)
        bits = (words[:, np.arange(35) // 32] >> (np.arange(35, dtype=np.uint32) % 32)) & 1
        assert (bits == sees).all()
        assert (words[:, 1] >> 3 == 0).all()


def test_width_beyond_the_registers_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 2048 rows, not 2049"):
        device.DeviceTrees.empty(1, 2049, CPU)


@pytest.mark.parametrize(("vocab", "chunk", "k"), [(1000, 256, 10), (300, 512, 1), (257, 64, 33)])
def test_top_k_equals_the_reference(vocab: int, chunk: int, k: int) -> None:
    """Ties within a chunk and across chunks, both zeros, forbidden tokens."""
    logits = np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32)
    logits[0, [5, 250, 130, 40]] = 4.0
    logits[1] = np.round(logits[1])
    logits[1, [3, 9]] = -0.0, 0.0
    logits[2, 4:] = -np.inf
    log_probs, token_ids = device.top_k_log_probs(torch.from_numpy(logits), k, chunk=chunk)
    expected, ids = reference.top_k_log_probs(logits, k)
    assert (token_ids.numpy() == ids).all()
    # float32 exponentials leave the log-sum-exp uncertain by an ulp.
    np.testing.assert_allclose(log_probs.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_top_k_shows_invalid_logits(bad: float) -> None:
    logits = torch.zeros(2, 100)
    logits[1, slice(None) if bad < 0 else 77] = bad
    log_probs, _ = device.top_k_log_probs(logits, 4, chunk=32)
    assert torch.isfinite(log_probs[0]).all()
    assert torch.isnan(log_probs[1]).all()


def test_top_k_of_bfloat16_logits() -> None:
    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    log_probs, token_ids = device.top_k_log_probs(logits, 8, chunk=64)
    expected, ids = reference.top_k_log_probs(logits.float().numpy(), 8)
    assert (token_ids.numpy() == ids).all()
    np.testing.assert_allclose(log_probs.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [0, 65])
def test_top_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k {k} is not between 1 and 64"):
        device.top_k_log_probs(torch.zeros(1, 100), k, chunk=64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place + 2, place)", "place + 1, place)"),
        ("first + 2, tl.where(is_child, first + 1", "first + 1, tl.where(is_child, first + 2"),
        ("best - own + beside.to(tl.float64)", "best + beside.to(tl.float64) - own"),
    ],
    ids=["later places not moved on", "sibling before child", "addition first"],
)
def test_a_planted_fault_is_caught(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = plant(device_tree, old, new, tmp_path)
    monkeypatch.setattr(device, "build_tree_kernel", faulty.build_tree_kernel)
    with pytest.raises(AssertionError):
        test_order_of_additions([[-(2.0**-51), -2.5], [-1, -3.5]])
        for seed in range(6):
            test_random_with_coarse_ties(seed)
