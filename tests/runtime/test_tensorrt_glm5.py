"""GLM-5 on the TensorRT runner, with the evaluator for its GPU: latents and the indexer's keys in
caches of two shapes, moved along the accepted path; selections of tree rows."""

import random
from pathlib import Path

import pytest

from engines import random_checkpoint
from evaluated_engine import evaluated_engine, evaluated_ranks
from planted import plant
from random_drafter import random_drafter
from random_glm5 import glm5_config
from request_mixes import CHAIN, PLAIN
from runner_checks import TREE, decode, furthest_from_paths, on_all_ranks
from trtree import _core
from trtree.build.lowering.tensorrt import backend, latent, ops
from trtree.build.options import BuildOptions, OptionError
from trtree.runtime.engines import tensorrt

VOCAB = 80
CONFIG = glm5_config(qk_nope_head_dim=48)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> BuildOptions:
    root = tmp_path_factory.mktemp("glm5")
    return BuildOptions(
        checkpoint=random_checkpoint(root / "target", CONFIG),
        drafter=random_drafter(root / "drafter", CONFIG),
        output=root / "engine",
        max_batch_size=3,
        max_seq_len=96,
        max_tree_budget=32,
        max_num_rows=70,
        kv_tokens=1024,
    )


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 between ops, where nothing hides a mistake and equal sums choose alike."""
    monkeypatch.setattr(backend, "DTYPE", "float32")


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_chain_and_tree_decode_the_tokens_of_plain(options: BuildOptions, wide: None) -> None:
    """Of prompts below and above index_topk; one comes in chunks."""
    engine, executables = evaluated_engine(options)
    assert engine.capabilities().tree_state == _core.TreeState.EXACT
    given = [prompt(length, length) for length in (3, 75, 11, 20)]
    alone = [decode(engine, [(tokens, PLAIN)])[0] for tokens in given]
    assert len({tuple(tokens) for tokens in alone}) == 4
    for modes in ((TREE,) * 4, (CHAIN, TREE, PLAIN, CHAIN)):
        assert decode(engine, list(zip(given, modes, strict=True))) == alone
    runs = executables["target.rank0.engine"].runs
    assert max(shapes["token_ids"][0] for _, shapes in runs) == 3


def furthest(options: BuildOptions) -> float:
    """The first rows see fewer keys than index_topk."""
    trees, _ = evaluated_engine(options)
    paths, _ = evaluated_engine(options)
    return furthest_from_paths(trees, paths, VOCAB, pages=16)


def test_a_tree_rows_logits_are_those_of_its_path(options: BuildOptions, wide: None) -> None:
    assert furthest(options) < 1e-5


FAULTS = {
    "one cache of two committed": (
        tensorrt,
        'for memory in self._kv["target"]:',
        'for memory in self._kv["target"][:1]:',
    ),
    "masked behind the choice": (latent, "emit.scalar(-torch.inf, 3)", "emit.scalar(0.0, 3)"),
    "hidden keys tie": (latent, '"AND", largest, seen', '"OR", largest, largest'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    options: BuildOptions, wide: None, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, old, new = FAULTS[fault]
    faulty = plant(module, old, new, tmp_path)
    if module is tensorrt:
        monkeypatch.setattr("evaluated_engine.TensorRTEngine", faulty.TensorRTEngine)
    else:
        monkeypatch.setitem(ops.OPS, "index_select", faulty.index_select)
    with pytest.raises((AssertionError, FloatingPointError)):  # a row may be left with no key
        assert furthest(options) < 1e-3


def test_ranks_decode_what_one_does(options: BuildOptions, wide: None) -> None:
    one, _ = evaluated_engine(options)
    two = evaluated_ranks(options, 2)
    given = [(prompt(75, 1), TREE), (prompt(9, 2), PLAIN)]
    assert on_all_ranks(two, given) == decode(one, given)
    whole = [memory.shape for memory in one._kv["target"]]
    for engine in two:  # latents are whole on every rank
        assert [memory.shape for memory in engine._kv["target"]] == whole


def test_long_selections_are_refused(options: BuildOptions, tmp_path: Path) -> None:
    """TopK takes no more; the plugin's kernel does."""
    from lowered import describe

    long = random_checkpoint(tmp_path / "long", glm5_config(index_topk=4000))
    options = options.with_changes({"checkpoint": long, "drafter": None})
    with pytest.raises(OptionError, match="index_topk is 4000, TensorRT offers at most 3840"):
        describe(options)
    plugin = {"backend": "tensorrt", "attention": "plugin", "sm": (120,), "activations": "bf16"}
    assert describe(options, **plugin).networks.keys() == {"target"}
