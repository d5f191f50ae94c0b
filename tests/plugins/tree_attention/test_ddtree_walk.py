"""The device walk, interpreted, against the published cases and the C++ walk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planted import plant
from trtree.plugins import ddtree
from trtree.plugins.ddtree import device, device_walk

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "ddtree_cases.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
CPU = torch.device("cpu")
BONUS, UNUSED = 7, -9
LAST = "tl.where(tl.max(follows.to(tl.int32), 0) > 0, tl.max(tl.where(follows, lane, 0), 0), _NONE)"


def trees_of(parts: Sequence[tuple[Sequence[int], Sequence[int]]], width: int) -> Any:
    """Trees from each one's node tokens and parents; unused rows hang under the root, as a
    larger tree of the round before may leave them."""
    trees = device.DeviceTrees.empty(len(parts), width, CPU)
    trees.tokens.fill_(BONUS)
    for index, (tokens, parents) in enumerate(parts):
        rows = len(parents)
        trees.num_rows[index] = rows
        trees.tokens[index, 1:rows] = torch.tensor(tokens, dtype=torch.int32)
        trees.parents[index, :rows] = torch.tensor(parents, dtype=torch.int32)
    return trees


def walk(
    trees: device.DeviceTrees, choices: Sequence[Sequence[int]]
) -> list[tuple[list[int], int]]:
    """(accepted rows, bonus token) of each request."""
    table = torch.full(trees.tokens.shape, BONUS, dtype=torch.int32)
    for index, row in enumerate(choices):
        table[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
    walks = device.DeviceWalks.empty(trees)
    walks.accepted.fill_(UNUSED)
    device.walk_trees(trees, table, walks)
    results = []
    numbers = (walks.accepted, walks.num_accepted, walks.bonus_tokens)
    for rows, count, bonus in zip(*(x.tolist() for x in numbers), strict=True):
        assert set(rows[count:]) <= {UNUSED}
        results.append((rows[:count], bonus))
    return results


def likely_choices(tree: ddtree.Tree, seed: int) -> list[int]:
    """At each row mostly a child's token, now and then one that no child carries."""
    rng = np.random.default_rng(seed)
    choices = []
    for row in range(tree.num_rows):
        children = np.flatnonzero(tree.parents == row)
        likely = len(children) and rng.random() < 0.85
        choices.append(int(tree.token_ids[rng.choice(children) - 1]) if likely else 10**6)
    return choices


def from_cpp(tree: ddtree.Tree, choices: list[int]) -> tuple[list[int], int]:
    accepted, bonus = tree.walk(choices)
    return accepted.tolist(), bonus


def test_golden() -> None:
    """All published cases as one batch of ragged trees; and the C++ on the same."""
    trees = trees_of([(c["node_token_ids"], c["parents"]) for c in CASES], 129)
    found = walk(trees, [case["posterior"] for case in CASES])
    assert found == [(case["accepted"], case["next_token"]) for case in CASES]
    assert max(len(accepted) for accepted, _ in found) > 3
    cpp = [ddtree.build_tree(np.array(c["logits"], np.float32), c["budget"]) for c in CASES]
    assert found == [
        from_cpp(tree, case["posterior"]) for tree, case in zip(cpp, CASES, strict=True)
    ]


def test_deep_walks_of_golden_trees() -> None:
    cpp = [ddtree.build_tree(np.array(c["logits"], np.float32), c["budget"]) for c in CASES]
    choices = [likely_choices(tree, seed) for seed, tree in enumerate(cpp)]
    trees = trees_of([(tree.token_ids.tolist(), tree.parents.tolist()) for tree in cpp], 129)
    found = walk(trees, choices)
    assert found == [from_cpp(tree, row) for tree, row in zip(cpp, choices, strict=True)]
    assert max(len(accepted) for accepted, _ in found) > 8


def test_edges() -> None:
    """A root alone, whose choice is the unused rows' token; siblings of one token; token 0; a
    choice that a row elsewhere carries; a chain to its end."""
    parts = [
        ([], [-1]),
        ([8, 8, 1, 2], [-1, 0, 0, 1, 2]),
        ([0, 0], [-1, 0, 1]),
        ([3, 4], [-1, 0, 0]),
        ([1, 2, 3], [-1, 0, 1, 2]),
    ]
    choices = [[BONUS], [8, 2, 2, 5, 5], [0, 0, 0], [3, 4, 4], [1, 2, 3, 9]]
    assert walk(trees_of(parts, 5), choices) == [
        ([0], BONUS),
        ([0, 1], 2),
        ([0, 1, 2], 0),
        ([0, 1], 4),
        ([0, 1, 2, 3], 9),
    ]


def test_trees_built_on_the_device_are_walked_there() -> None:
    log_probs = torch.tensor([[[-0.1, -2.0], [-0.2, -1.0]]])
    token_ids = torch.tensor([[[5, 6], [7, 8]]], dtype=torch.int32)
    trees = device.DeviceTrees.empty(1, 5, CPU)
    one = torch.ones(1, dtype=torch.int32)
    device.build_trees(log_probs, token_ids, one, one, 4 * one, trees)
    tree = ddtree.build_tree_from_top_k(log_probs[0], token_ids[0], 4)
    for choices in ([5, 8, 7, 7, 7], [6, 8, 7, 7, 7], [9, 8, 7, 7, 7]):
        assert walk(trees, [choices]) == [from_cpp(tree, choices)]


@pytest.mark.parametrize("choices", [torch.zeros(1, 4).int(), torch.zeros(1, 5).long()])
def test_choices_of_another_shape_or_type_are_refused(choices: torch.Tensor) -> None:
    trees = trees_of([([], [-1])], 5)
    with pytest.raises(ValueError, match=r"the trees want int32 \[1, 5\]"):
        device.walk_trees(trees, choices, device.DeviceWalks.empty(trees))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("live & (parent == row) &", "live &"),
        ("tl.min(tl.where(follows, lane, _NONE), 0)", LAST),
        ("live = lane < rows", "live = lane < width"),
    ],
    ids=["any row of that token", "the last of equal siblings", "rows past the tree"],
)
def test_a_planted_fault_is_caught(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = plant(device_walk, old, new, tmp_path)
    monkeypatch.setattr(device, "walk_tree_kernel", faulty.walk_tree_kernel)
    with pytest.raises(AssertionError):
        test_edges()
