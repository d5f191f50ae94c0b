"""Medusa tables as TensorRT-LLM defined them, and static trees from calibration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtree.build.tree_tables import (
    choices_from_log_probs,
    choices_to_json,
    medusa_tables,
)
from trtree.plugins.ddtree import build_tree_from_top_k, reference, static_tree

CASES = json.loads((Path(__file__).parents[1] / "data/golden/medusa_cases.json").read_text())
FIELDS = ("topks", "tree_ids", "position_offsets", "paths", "packed_mask")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case['choices'])}-nodes")
@pytest.mark.parametrize("order", ["as given", "reversed"])
def test_published_tables(case: dict[str, Any], order: str) -> None:
    choices = case["choices"] if order == "as given" else case["choices"][::-1]
    tables = medusa_tables(choices)
    assert tables.to_json() == {field: case[field] for field in FIELDS}
    for field in FIELDS[1:]:
        assert getattr(tables, field).dtype == np.int32
    assert json.loads(json.dumps(tables.to_json())) == tables.to_json()


def test_no_choices() -> None:
    assert medusa_tables([]).to_json() == {
        "topks": [],
        "tree_ids": [0],
        "position_offsets": [0],
        "paths": [[0]],
        "packed_mask": [[1]],
    }


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1], [0]], r"choice \[0\] is there twice"),
        ([[0], [0, 1, 2]], r"choice \[0, 1, 2\] has no parent: add \[0, 1\]"),
        ([[0], [0, -1]], r"choice \[0, -1\]: rank -1 is negative"),
        ([[0], []], r"choice \[\]: the root is not listed"),
    ],
)
@pytest.mark.parametrize("function", [medusa_tables, choices_to_json])
def test_refused_choices(
    function: Callable[[Any], Any], choices: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(choices)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 8), st.integers(1, 12), st.integers(0, 130))
def test_choices_are_the_ranks_of_the_dynamic_tree(
    seed: int, depth: int, k: int, budget: int
) -> None:
    log_probs = -np.random.default_rng(seed).integers(0, 6, (depth, k)).cumsum(1) / 4
    choices = choices_from_log_probs(log_probs, budget)
    log_probs = log_probs.astype(np.float32)
    ids = np.arange(depth * k, dtype=np.int32).reshape(depth, k) + 100
    assert choices == reference.build_tree(log_probs, ids, budget).paths

    tree = build_tree_from_top_k(log_probs, ids, budget)
    assert [int(ids[len(p) - 1, p[-1]]) for p in choices] == tree.token_ids.tolist()
    # The tables and the executor's static tree agree row by row.
    static = static_tree(choices, ids)
    tables = medusa_tables(choices)
    assert np.array_equal(tables.packed_mask, static.packed_mask)
    assert np.array_equal(tables.position_offsets[1:], static.depths)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
def test_log_probs_of_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"log_probs must be \[depth, k\]"):
        choices_from_log_probs(np.zeros(shape), 3)


def test_integer_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="log_probs must be float32, not int64"):
        choices_from_log_probs(np.zeros((2, 2), np.int64), 3)


def test_json() -> None:
    assert choices_to_json([(0,), (0, 0), (1,)]) == [[0], [0, 0], [1]]
