"""GLM-5 on the runner of engines with attention plugins, with the evaluator for its GPU: latents
and the indexer's keys in the executor's pages, selections as lists of slots.

Everything else is as in test_tensorrt_glm5.py.
"""

import random
from collections.abc import Sequence

import pytest
import torch

from engines import random_checkpoint
from evaluated_engine import evaluated_engine, evaluated_ranks
from random_drafter import random_drafter
from random_glm5 import glm5_config
from request_mixes import CHAIN, PLAIN
from runner_checks import TREE, decode, furthest_from_paths, on_all_ranks, run_counting
from trtree import _core
from trtree.build.options import BuildOptions
from trtree.runtime.engines.tensorrt_commits import Commits, DeviceCommits, PagesCommit
from trtree.runtime.executor import Executor

VOCAB = 80
PLUGIN = {"backend": "tensorrt", "attention": "plugin", "activations": "bf16", "sm": (120,)}
CONFIG = glm5_config(qk_nope_head_dim=48)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> BuildOptions:
    root = tmp_path_factory.mktemp("glm5")
    return BuildOptions(
        checkpoint=random_checkpoint(root / "target", CONFIG),
        drafter=random_drafter(root / "drafter", CONFIG, head_dim=64),
        output=root / "engine",
        page_size=4,
        max_batch_size=3,
        max_seq_len=96,
        max_tree_budget=32,
        max_num_rows=70,
        kv_tokens=1024,
    )


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def test_chain_and_tree_decode_the_tokens_of_plain(options: BuildOptions) -> None:
    """Of prompts below and above index_topk; one comes in chunks. Their pages serve again."""
    engine, executables = evaluated_engine(options, **PLUGIN)
    assert engine.capabilities().tree_state == _core.TreeState.EXACT
    assert engine.capabilities().kv_layout == _core.KvLayout.PAGED
    given = [prompt(length, length) for length in (3, 75, 11, 20)]
    alone = [decode(engine, [(tokens, PLAIN)])[0] for tokens in given]
    assert len({tuple(tokens) for tokens in alone}) == 4
    for modes in ((TREE,) * 4, (CHAIN, TREE, PLAIN, CHAIN)):
        assert decode(engine, list(zip(given, modes, strict=True))) == alone
    runs = executables["target.rank0.engine"].runs
    assert max(shapes["requests"][0] for _, shapes in runs) > 64  # more than one prompt's chunk


def test_prompts_that_begin_alike_share_pages(options: BuildOptions) -> None:
    """Latents and the indexer's keys of a prefix are read, not computed again."""
    engine, _ = evaluated_engine(options, **PLUGIN)
    prefix = prompt(40, 1)
    given = [prefix + prompt(9, seed) for seed in (2, 3)]
    cold = [decode(engine, [(tokens, PLAIN)])[0] for tokens in given]
    executor = Executor(engine)
    for tokens, expected in zip(given, cold, strict=True):
        ((decoded, _),) = run_counting(executor, [(tokens, TREE)])
        assert decoded == expected
    assert executor.latest_statistics().cached_prompt_tokens == 40


def furthest(options: BuildOptions, commits: Commits | None = None) -> float:
    """The first rows see fewer keys than index_topk."""
    trees, _ = evaluated_engine(options, commits, **PLUGIN)
    paths, _ = evaluated_engine(options, commits, **PLUGIN)
    return furthest_from_paths(trees, paths, VOCAB, pages=24)


def test_a_tree_rows_logits_are_those_of_its_path(options: BuildOptions) -> None:
    assert furthest(options) < 1e-3


def test_the_commit_kernel_moves_latents_and_keys(options: BuildOptions) -> None:
    """Interpreted; caches of two shapes, a launch each."""
    assert furthest(options, DeviceCommits()) < 1e-3

    class FirstShape(DeviceCommits):
        def pages(self, caches: Sequence[torch.Tensor]) -> PagesCommit:
            return super().pages([cache for cache in caches if cache.shape == caches[0].shape])

    assert furthest(options, FirstShape()) > 1e-2


def test_ranks_decode_what_one_does(options: BuildOptions) -> None:
    two = evaluated_ranks(options, 2, **PLUGIN)
    given = [(prompt(75, 1), TREE), (prompt(9, 2), PLAIN)]
    tree, plain = on_all_ranks(two, given), on_all_ranks(two, [(p, PLAIN) for p, _ in given])
    assert tree == plain


def test_nan_among_the_scores_is_an_error_that_says_where(options: BuildOptions) -> None:
    engine, executables = evaluated_engine(options, **PLUGIN)
    fixed = executables["target.rank0.engine"].evaluator.fixed
    (name,) = [name for name in fixed if "weights_proj" in name and fixed[name].ndim == 2]
    fixed[name].fill_(float("nan"))
    at = _core.Sequence(1, 0, 0, [3, 4, 5])
    with pytest.raises(FloatingPointError, match="index_select: NaN in the scores of row 0"):
        engine.step(_core.RowBatch([_core.SegmentRequest(at, [5], [-1], [0])]))
