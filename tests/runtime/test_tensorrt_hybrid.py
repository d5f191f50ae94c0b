"""Hybrids on the TensorRT runner, with the evaluator for its GPU: states that branch are read by
runs, kept until commit, and moved along the accepted path."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engines import random_checkpoint
from evaluated_engine import EvaluatedExecutable, evaluated_engine, evaluated_ranks
from random_drafter import random_drafter
from random_hybrid import hybrid_config
from request_mixes import CHAIN, PLAIN
from runner_checks import TREE, decode, on_all_ranks
from steps import path_to, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.lowering.tensorrt import backend
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine
from trtree.runtime.engines.reference import ReferenceEngine
from trtree.runtime.engines.tensorrt import TensorRTEngine
from trtree.runtime.engines.tensorrt_states import BranchStates, Kept

VOCAB = 80
FAMILIES = {
    "next": "Qwen3NextForCausalLM",
    "3.5": "Qwen3_5ForCausalLM",
    "3.5-moe": "Qwen3_5MoeForCausalLM",
}
Engines = Callable[[str], tuple[TensorRTEngine, dict[str, EvaluatedExecutable]]]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BuildOptions]:
    root = tmp_path_factory.mktemp("hybrids")

    @cache
    def of(family: str) -> BuildOptions:
        config = hybrid_config(FAMILIES[family])
        return BuildOptions(
            checkpoint=random_checkpoint(root / family, config),
            drafter=random_drafter(root / f"{family}.drafter", config),
            output=root / f"{family}.engine",
            max_batch_size=3,
            max_seq_len=96,
            max_tree_budget=32,
            max_num_rows=70,
            kv_tokens=1024,
        )

    return of


@pytest.fixture(scope="module")
def engines(options: Callable[[str], BuildOptions]) -> Engines:
    return cache(lambda family: evaluated_engine(options(family)))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chain_and_tree_decode_the_tokens_of_plain(engines: Engines, family: str) -> None:
    """Also of a prompt in chunks; requests take turns in three slots, which start afresh."""
    engine, executables = engines(family)
    assert engine.capabilities().tree_state == _core.TreeState.EXACT
    assert engine.capabilities().recurrent_state
    given = [prompt(length, length) for length in (3, 75, 11, 20)]
    alone = [decode(engine, [(tokens, PLAIN)])[0] for tokens in given]
    assert len({tuple(tokens) for tokens in alone}) == 4
    for modes in ((TREE,) * 4, (CHAIN, TREE, PLAIN, CHAIN)):
        assert decode(engine, list(zip(given, modes, strict=True))) == alone
    runs = executables["target.rank0.engine"].runs
    assert max(shapes["token_ids"][0] for _, shapes in runs) == 3


def drive(ours: Any, theirs: Any, rounds: int) -> float:
    """Random trees on both, paths through the middle committed; the furthest apart that logits
    and committed states were."""
    rng, lengths, worst = random.Random(3), {0: 0, 2: 0}, 0.0
    for round_ in range(rounds):
        requests = []
        for slot, length in lengths.items():
            tokens, parents = random_tree(rng, rng.choice([1, 8, 32]), VOCAB)
            if round_ == 0:  # a prompt
                tokens, parents = prompt(30, slot), list(range(-1, 29))
            at = _core.Sequence(slot, slot, length, list(range(8 * slot, 8 * slot + 8)))
            requests.append((at, tokens, parents))
        results = [run_rows(engine, requests) for engine in (ours, theirs)]
        for got, want in zip(*results, strict=True):
            worst = max(worst, float(abs(got - want).max()))
        commits = []
        for at, tokens, parents in requests:
            row = len(tokens) - 1 if round_ == 0 else rng.randrange(len(tokens))
            commits.append(_core.Commit(at, path_to(row, parents)))
            lengths[at.slot] += len(commits[-1].rows)
        for engine in (ours, theirs):
            engine.commit(commits)
        states = ours._states.inputs
        assert set(states) == set(theirs._committed)
        for name, state in states.items():
            apart = (state[[0, 2]] - theirs._committed[name][[0, 2]]).abs()
            worst = max(worst, float(apart.max()))
    return worst


@pytest.fixture
def wide(options: Callable[[str], BuildOptions], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine and the reference with float32 between ops, where nothing hides a mistake."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    given = options("3.5")
    path = given.output.with_name("reference")
    if not path.exists():
        changes = {"backend": "reference", "output": path, "page_size": 16}
        builder.write(builder.describe(given.with_changes(changes)))
    ours, _ = evaluated_engine(given, max_tree_budget=40)
    _, theirs = open_engine(path)
    assert isinstance(theirs, ReferenceEngine)
    return ours, theirs


def test_committed_states_are_the_references(wide: Any) -> None:
    assert drive(*wide, rounds=8) < 1e-5


@pytest.mark.parametrize("family", ["next", "3.5"])
def test_ranks_have_their_heads_states_and_decode_what_one_does(
    options: Callable[[str], BuildOptions], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 between ops, where sums in another order choose the same tokens."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    one, _ = evaluated_engine(options(family))
    two = evaluated_ranks(options(family), 2)
    given = [(prompt(75, 1), TREE), (prompt(9, 2), PLAIN)]
    assert on_all_ranks(two, given) == decode(one, given)
    whole = one._states.inputs
    for engine in two:
        for name, part in engine._states.inputs.items():
            assert part.numel() == whole[name].numel() // 2


def test_a_wrong_commit_shows(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows in front instead of the path's: a rejected sibling's update is committed."""
    whole = BranchStates.commit

    def commit(states: BranchStates, slot: int, kept: Kept, path: np.ndarray) -> None:
        whole(states, slot, kept, np.arange(len(path)))

    monkeypatch.setattr(BranchStates, "commit", commit)
    assert drive(*wide, rounds=4) > 1e-2


def test_layers_of_different_shapes_are_refused(engines: Engines) -> None:
    spec = engines("3.5")[0]._engines["target"].spec
    (name,) = (name for name, kind in spec.branches.items() if kind == "recurrent")
    other = replace(
        next(b for b in spec.inputs if b.name == name), name="x", dims=("batch", 1, 2, 3)
    )
    mixed = replace(
        spec, inputs=(*spec.inputs, other), branches={**spec.branches, "x": "recurrent"}
    )
    with pytest.raises(ValueError, match="recurrent states of different shapes"):
        BranchStates(mixed, 2, torch.device("cpu"))
