"""The TensorRT runner, driven by the C++ executor, with the evaluator for its GPU.

Networks are bf16: evaluated in float64 and rounded once per layer, a row depends on nothing
else in its step, so padding, batch shape and tree must not show in the tokens.
"""

from pathlib import Path

import pytest
import torch

from engines import DEMO_VOCAB, random_checkpoint
from evaluated_engine import EvaluatedExecutable, evaluated_engine, evaluated_ranks
from random_drafter import random_drafter
from random_moe import glm4_moe_config
from request_mixes import CHAIN, PLAIN
from runner_checks import MAX_TOKENS, ROOT, TREE, decode, decode_counting, on_all_ranks, prompts
from trtree import _core
from trtree.build.options import BuildOptions, read_options
from trtree.runtime.engines.tensorrt import TensorRTEngine

Evaluated = tuple[TensorRTEngine, dict[str, EvaluatedExecutable]]


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_engine(
        read_options(ROOT / "configs" / "demo.yaml"),
        activations="bf16",
        max_batch_size=4,
        max_seq_len=96,
        max_tree_budget=16,
        max_num_rows=80,
    )


def test_chain_and_tree_decode_the_tokens_of_plain(evaluated: Evaluated) -> None:
    engine, executables = evaluated
    given = prompts(12)
    alone = [decode(engine, [(prompt, PLAIN)])[0] for prompt in given]
    assert all(len(tokens) == MAX_TOKENS for tokens in alone)
    assert len({tuple(tokens) for tokens in alone}) > 8  # it is not one text again and again
    before = len(executables["target.rank0.engine"].runs)
    for speculative in (CHAIN, TREE):
        assert decode(engine, [(prompt, speculative) for prompt in given]) == alone
    # And it speculates: fewer target runs than tokens, several requests in each.
    runs = executables["target.rank0.engine"].runs[before:]
    verify = [shapes["token_ids"] for profile, shapes in runs if profile == "verify"]
    assert max(shape[0] for shape in verify) == 4
    assert sum(shape[0] for shape in verify) < 0.7 * 2 * len(given) * MAX_TOKENS


def test_modes_share_a_step(evaluated: Evaluated) -> None:
    """Prefill chunks, single rows and trees at once, in slots with gaps between: each
    request gets the tokens it gets alone, and in as many passes: its drafter's context is
    its own too."""
    engine, _ = evaluated
    given = list(zip(prompts(8), [PLAIN, TREE, CHAIN, TREE] * 2, strict=True))
    alone = [decode_counting(engine, [request])[0] for request in given]
    assert decode_counting(engine, given) == alone


def test_long_prompts_come_in_chunks(evaluated: Evaluated) -> None:
    engine, executables = evaluated
    prompt = (prompts(4)[0] + prompts(4)[1] * 9)[:79]
    target = executables["target.rank0.engine"]
    start = len(target.runs)
    one, two = decode(engine, [(prompt, TREE), (prompt[:40], TREE)])
    widths = [s["token_ids"][1] for profile, s in target.runs[start:] if profile == "prefill"]
    assert len(widths) >= 2
    assert one == decode(engine, [(prompt, PLAIN)])[0]
    assert two == decode(engine, [(prompt[:40], PLAIN)])[0]


def test_two_ranks_decode_alike_and_lose_nothing() -> None:
    """Each rank has an executor and a runner; their networks meet at the collectives."""
    engines = evaluated_ranks(
        read_options(ROOT / "configs" / "demo.yaml"),
        2,
        activations="bf16",
        max_batch_size=2,
        max_seq_len=96,
        max_tree_budget=16,
    )
    given = prompts(3)

    tree, plain = (on_all_ranks(engines, [(p, mode) for p in given]) for mode in (TREE, PLAIN))
    assert tree == plain


def test_commit_moves_the_accepted_rows_of_every_layer(evaluated: Evaluated) -> None:
    engine, _ = evaluated
    at = _core.Sequence(5, 2, 0, [])
    engine.step(_core.RowBatch([_core.SegmentRequest(at, [5, 6, 7, 8], [-1, 0, 0, 2], [3])]))
    (cache,) = engine._kv["target"]
    expected = cache[:, 2, :, [0, 2, 3]].clone()
    engine.commit([_core.Commit(at, [0, 2, 3])])
    assert torch.equal(cache[:, 2, :, :3], expected)
    assert len(cache) == 12  # six layers' keys and values


def test_what_it_refuses(evaluated: Evaluated) -> None:
    engine, _ = evaluated
    at = _core.Sequence(7, 0, 0, [])
    engine.step(_core.RowBatch([_core.SegmentRequest(at, [5, 6, 7], [-1, 0, 0], [2])]))
    with pytest.raises(ValueError, match=r"request 7: rows \[0, 1, 2\] are no path"):
        engine.commit([_core.Commit(at, [0, 1, 2])])
    with pytest.raises(ValueError, match="commit of row 3 of 3"):
        engine.commit([_core.Commit(at, [0, 3])])
    with pytest.raises(ValueError, match="request 8: commit without rows"):
        engine.commit([_core.Commit(_core.Sequence(8, 0, 0, []), [0])])
    full = _core.Sequence(9, 0, 120, [])
    rows = [_core.SegmentRequest(full, [1] * 17, [i - 1 for i in range(17)], list(range(17)))]
    with pytest.raises(IndexError, match="slot 0: 17 rows behind 120 committed tokens"):
        engine.step(_core.RowBatch(rows))
    wide = [_core.SegmentRequest(at, [1] * 30, [i - 1 for i in range(30)], list(range(30)))]
    with pytest.raises(ValueError, match="30 output rows of 30; the engine gives all of at most"):
        engine.step(_core.RowBatch(wide))


def test_logits_of_rows_that_want_them(evaluated: Evaluated) -> None:
    engine, _ = evaluated
    at, other = _core.Sequence(1, 0, 0, []), _core.Sequence(2, 3, 0, [])
    batch = _core.RowBatch(
        [
            _core.SegmentRequest(at, [5, 6], [-1, 0], [0, 1], True),
            _core.SegmentRequest(other, [9], [-1], [0], False),
        ]
    )
    result = engine.step(batch)
    logits = result.logits.reshape(2, DEMO_VOCAB)
    assert result.argmax[:2].tolist() == logits.argmax(-1).tolist()


def test_nan_is_an_error_that_says_where(evaluated: Evaluated) -> None:
    engine, executables = evaluated
    weight = executables["target.rank0.engine"].evaluator.fixed["model.norm/weight"]
    saved = weight.clone()
    weight.fill_(float("nan"))
    at = _core.Sequence(1, 0, 0, [])
    try:
        with pytest.raises(FloatingPointError, match="NaN in the logits of output row 0"):
            engine.step(_core.RowBatch([_core.SegmentRequest(at, [5], [-1], [0])]))
    finally:
        weight.copy_(saved)


def test_experts_decode_the_tokens_of_plain(tmp_path: Path) -> None:
    """Experts compute every row of the padded batch; no row may see another's."""
    config = glm4_moe_config(attention_bias=False)
    options = BuildOptions(
        checkpoint=random_checkpoint(tmp_path / "target", config, algorithm="W4A16_NVFP4"),
        drafter=random_drafter(tmp_path / "drafter", config),
        max_batch_size=3,
        max_seq_len=48,
        max_tree_budget=16,
        max_num_rows=80,
    )
    engine, _ = evaluated_engine(options)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randint(0, 80, (n,), generator=generator).tolist() for n in (3, 20, 11)]
    alone = [decode(engine, [(prompt, PLAIN)])[0] for prompt in given]
    assert len({tuple(tokens) for tokens in alone}) == 3
    for modes in ((TREE,) * 3, (CHAIN, TREE, PLAIN)):
        assert decode(engine, list(zip(given, modes, strict=True))) == alone
