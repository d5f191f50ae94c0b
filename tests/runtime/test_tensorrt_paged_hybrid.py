"""Hybrids on the runner of engines with attention plugins, with the evaluator for its GPU: ragged
rows over states in slots, moved along the accepted path by the commit kernels.

Everything else is as in test_tensorrt_hybrid.py.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from engines import random_checkpoint
from evaluated_engine import ReferenceCommits, evaluated_engine, evaluated_ranks
from lowered import describe
from random_drafter import random_drafter
from random_hybrid import hybrid_config
from request_mixes import CHAIN, PLAIN
from runner_checks import TREE, decode, on_all_ranks, run_counting
from steps import path_to, random_tree, run_rows
from trtree import _core
from trtree.build import builder
from trtree.build.lowering.tensorrt import backend
from trtree.build.options import BuildOptions, OptionError
from trtree.runtime.engines import open_engine
from trtree.runtime.engines.tensorrt_commits import Commits, DeviceCommits
from trtree.runtime.executor import Executor, ExecutorConfig, KvCacheConfig

VOCAB = 80
PLUGIN = {"backend": "tensorrt", "attention": "plugin", "activations": "bf16", "sm": (120,)}
HEADS_OF_64 = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
FAMILIES = {
    "next": "Qwen3NextForCausalLM",
    "3.5": "Qwen3_5ForCausalLM",
    "3.5-moe": "Qwen3_5MoeForCausalLM",
}
Options = Callable[[str], BuildOptions]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    root = tmp_path_factory.mktemp("hybrids")

    @cache
    def of(family: str) -> BuildOptions:
        config = hybrid_config(FAMILIES[family], **HEADS_OF_64)
        return BuildOptions(
            checkpoint=random_checkpoint(root / family, config),
            drafter=random_drafter(root / f"{family}.drafter", config, head_dim=64),
            output=root / f"{family}.engine",
            page_size=4,
            max_batch_size=3,
            max_seq_len=96,
            max_tree_budget=32,
            max_num_rows=70,
            kv_tokens=1024,
        )

    return of


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chain_and_tree_decode_the_tokens_of_plain(options: Options, family: str) -> None:
    """Also of a prompt in chunks; requests take turns in three slots, which start afresh."""
    engine, executables = evaluated_engine(options(family), **PLUGIN)
    assert engine.capabilities().tree_state == _core.TreeState.EXACT
    assert engine.capabilities().kv_layout == _core.KvLayout.PAGED
    assert engine.capabilities().recurrent_state
    given = [prompt(length, length) for length in (3, 75, 11, 20)]
    alone = [decode(engine, [(tokens, PLAIN)])[0] for tokens in given]
    assert len({tuple(tokens) for tokens in alone}) == 4
    for modes in ((TREE,) * 4, (CHAIN, TREE, PLAIN, CHAIN)):
        assert decode(engine, list(zip(given, modes, strict=True))) == alone
    # Prompts, rows and trees of several requests are one ragged run.
    runs = executables["target.rank0.engine"].runs
    assert max(shapes["requests"][0] for _, shapes in runs) > 64


def test_prompts_that_begin_alike_share_pages_and_states(options: Options) -> None:
    engine, _ = evaluated_engine(options("3.5"), **PLUGIN)
    prefix = prompt(40, 1)
    given = [prefix + prompt(9, seed) for seed in (2, 3, 4)]
    cold = [decode(engine, [(tokens, PLAIN)])[0] for tokens in given]
    executor = Executor(engine, ExecutorConfig(kv_cache_config=KvCacheConfig(snapshot_interval=8)))
    for tokens, expected in zip(given, cold, strict=True):
        ((decoded, _),) = run_counting(executor, [(tokens, TREE)])
        assert decoded == expected
    statistics = executor.latest_statistics()
    assert statistics.snapshots_loaded > 0
    assert statistics.cached_prompt_tokens >= 40


def drive(ours: Any, theirs: Any, rounds: int) -> float:
    """Random trees on both, paths through the middle committed, and states on the way saved; the
    furthest apart that logits, committed states and saved ones were."""
    rng, lengths, worst = random.Random(3), {0: 0, 2: 0}, 0.0
    for round_ in range(rounds):
        requests = []
        for slot, length in lengths.items():
            tokens, parents = random_tree(rng, rng.choice([1, 8, 32]), VOCAB)
            if round_ == 0:  # a prompt
                tokens, parents = prompt(30, slot), list(range(-1, 29))
            at = _core.Sequence(slot, slot, length, list(range(24 * slot, 24 * slot + 24)))
            requests.append((at, tokens, parents))
        results = [run_rows(engine, requests) for engine in (ours, theirs)]
        for got, want in zip(*results, strict=True):
            worst = max(worst, float(abs(got - want).max()))
        commits = []
        for at, tokens, parents in requests:
            row = len(tokens) - 1 if round_ == 0 else rng.randrange(len(tokens))
            path = path_to(row, parents)
            # After the first row, one between and the last; of the other request once.
            rows = sorted({1, 1 + len(path) // 2, len(path)})[: 3 if at.slot == 0 else 1]
            saves = [_core.StateSave(n, 2 * at.slot + i) for i, n in enumerate(rows, 1)]
            commits.append(_core.Commit(at, path, True, saves))
            lengths[at.slot] += len(path)
        for engine in (ours, theirs):
            engine.commit(commits)
        assert set(ours._states.committed) == set(theirs._committed)
        for snapshot in range(6):
            for engine in (ours, theirs):
                engine.load_state(snapshot, 1)
            for name, state in ours._states.committed.items():
                worst = max(worst, float((state - theirs._committed[name]).abs().max()))
    return worst


@pytest.fixture
def wide(options: Options, monkeypatch: pytest.MonkeyPatch) -> Callable[[Commits], Any]:
    """An engine and the reference with float32 between ops, where nothing hides a mistake."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    given = options("3.5")
    path = given.output.with_name("reference")
    if not path.exists():
        builder.write(
            builder.describe(given.with_changes({"backend": "reference", "output": path}))
        )

    def engines(commits: Commits) -> Any:
        ours, _ = evaluated_engine(given, commits, **PLUGIN)
        return ours, open_engine(path)[1]

    return engines


def test_committed_states_are_the_references(wide: Callable[[Commits], Any]) -> None:
    assert drive(*wide(ReferenceCommits()), rounds=6) < 1e-5


def test_the_commit_kernels_do_as_the_references(wide: Callable[[Commits], Any]) -> None:
    """Interpreted, on the runner's memory."""
    assert drive(*wide(DeviceCommits()), rounds=4) < 1e-5


class Wrong(ReferenceCommits):
    """Commits the rows in front instead of the path's: a rejected sibling's updates."""

    def __init__(self, what: str) -> None:
        self.what = what

    def window(self, window: Any, x: Any, tables: Any, accepted: Any, num_accepted: Any) -> None:
        rows = torch.arange(accepted.shape[1]).expand(accepted.shape)
        super().window(window, x, tables, rows if self.what == "window" else accepted, num_accepted)

    def state(self, state: Any, rows: Any, tables: Any, accepted: Any, num_accepted: Any) -> None:
        first = torch.arange(accepted.shape[1]).expand(accepted.shape)
        super().state(
            state, rows, tables, first if self.what == "state" else accepted, num_accepted
        )


@pytest.mark.parametrize("what", ["window", "state"])
def test_a_wrong_commit_shows(wide: Callable[[Commits], Any], what: str) -> None:
    assert drive(*wide(Wrong(what)), rounds=4) > 1e-2


def test_ranks_have_their_heads_states_and_decode_what_one_does(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 between ops, where sums in another order choose the same tokens."""
    monkeypatch.setattr(backend, "DTYPE", "float32")
    one, _ = evaluated_engine(options("next"), **PLUGIN)
    two = evaluated_ranks(options("next"), 2, **PLUGIN)
    given = [(prompt(40, 1), TREE), (prompt(9, 2), PLAIN)]
    assert on_all_ranks(two, given) == decode(one, given)
    for engine in two:
        for name, part in engine._states.committed.items():
            assert part.numel() == one._states.committed[name].numel() // 2


def test_heads_without_kernels_are_refused(options: Options, tmp_path: Any) -> None:
    config = hybrid_config(FAMILIES["3.5"], head_dim=64)
    given = options("3.5").with_changes(
        {"checkpoint": random_checkpoint(tmp_path / "target", config), "drafter": None}
    )
    with pytest.raises(OptionError, match=r"recurrent has keys of 16 and values of 32, its kern"):
        describe(given, **PLUGIN)
