"""The runner of engines with attention plugins, driven by the C++ executor over its pages, with
the evaluator for its GPU: plugin layers are computed from their kernels' contract.

Everything else is as in test_tensorrt_runner.py.
"""

import pytest
import torch

from engines import DEMO_VOCAB
from evaluated_engine import EvaluatedExecutable, evaluated_engine, evaluated_ranks
from request_mixes import CHAIN, PLAIN
from runner_checks import MAX_TOKENS, ROOT, TREE, decode, decode_counting, on_all_ranks, prompts
from trtree import _core
from trtree.build.options import read_options
from trtree.runtime.engines.tensorrt_commits import DeviceCommits
from trtree.runtime.engines.tensorrt_paged import PagedTensorRTEngine, rounded_up
from trtree.runtime.executor import Executor, OutputConfig, Request

Evaluated = tuple[PagedTensorRTEngine, dict[str, EvaluatedExecutable]]
SIZES = {
    "backend": "tensorrt",
    "attention": "plugin",
    "activations": "bf16",
    "max_batch_size": 4,
    "max_seq_len": 96,
    "max_tree_budget": 16,
    "max_num_rows": 80,
    "kv_tokens": 512,
}


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    return evaluated_engine(read_options(ROOT / "configs" / "demo.yaml"), **SIZES)


def test_chain_and_tree_decode_the_tokens_of_plain(evaluated: Evaluated) -> None:
    engine, executables = evaluated
    given = prompts(12)
    plain = decode(engine, [(prompt, PLAIN) for prompt in given])
    assert all(len(tokens) == MAX_TOKENS for tokens in plain)
    assert len({tuple(tokens) for tokens in plain}) > 8  # it is not one text again and again
    runs = executables["target.rank0.engine"].runs
    before = len(runs)
    for speculative in (CHAIN, TREE):
        assert decode(engine, [(prompt, speculative) for prompt in given]) == plain
    # And it speculates: fewer target runs than tokens, several requests in each.
    assert len(runs) - before < 0.8 * 2 * len(given) * MAX_TOKENS / 4
    assert {profile for profile, _ in runs} == {"step"}
    # A few sizes serve all steps.
    assert len({shapes["token_ids"] for _, shapes in runs}) < 16


def test_modes_share_a_step(evaluated: Evaluated) -> None:
    """Prefill chunks, single rows and trees at once: each request gets the tokens it gets alone,
    and in as many passes: its drafter's context is its own too."""
    engine, _ = evaluated
    given = list(zip(prompts(4), [PLAIN, TREE, CHAIN, TREE], strict=True))
    alone = [decode_counting(engine, [request])[0] for request in given]
    assert decode_counting(engine, given) == alone


def test_pages_of_one_token() -> None:
    engine, _ = evaluated_engine(
        read_options(ROOT / "configs" / "demo.yaml"), **SIZES | {"page_size": 1}
    )
    given = prompts(2)
    plain = decode(engine, [(prompt, PLAIN) for prompt in given])
    assert decode(engine, [(prompt, TREE) for prompt in given]) == plain
    assert engine.capabilities().page_size == 1
    assert engine.capabilities().kv_layout == _core.KvLayout.PAGED


def test_fp8_kv_loses_nothing() -> None:
    """A row's own keys are rounded as those of the prefix are; the drafter's are not."""
    options = read_options(ROOT / "configs" / "demo.yaml")
    engine, _ = evaluated_engine(options, **SIZES | {"kv_cache": "fp8"})
    target = {cache.dtype for name, cache in engine.caches.items() if name.startswith("model")}
    assert target == {torch.float8_e4m3fn}
    assert {c.dtype for c in engine.caches.values()} == {torch.float8_e4m3fn, torch.bfloat16}
    given = prompts(2)
    plain = decode(engine, [(prompt, PLAIN) for prompt in given])
    assert all(len(tokens) == MAX_TOKENS for tokens in plain)
    for speculative in (CHAIN, TREE):
        assert decode(engine, [(prompt, speculative) for prompt in given]) == plain


def test_two_ranks_decode_alike_and_lose_nothing() -> None:
    engines = evaluated_ranks(
        read_options(ROOT / "configs" / "demo.yaml"), 2, **SIZES | {"max_batch_size": 2}
    )
    given = prompts(2)
    tree, plain = (on_all_ranks(engines, [(p, mode) for p in given]) for mode in (TREE, PLAIN))
    assert tree == plain


@pytest.mark.parametrize("kv_cache", ["float", "fp8"])
def test_the_commit_kernel_moves_every_layer(kv_cache: str) -> None:
    """The kernel itself, interpreted, on the runner's memory: two requests, scattered pages."""
    engine, _ = evaluated_engine(
        read_options(ROOT / "configs" / "demo.yaml"),
        DeviceCommits(),
        **SIZES | {"page_size": 2, "kv_cache": kv_cache},
    )
    one, other = _core.Sequence(5, 2, 0, [9, 3, 7, 1]), _core.Sequence(6, 0, 1, [4, 11, 2, 8])
    engine.step(
        _core.RowBatch(
            [
                _core.SegmentRequest(one, [5, 6, 7, 8], [-1, 0, 0, 2], [0, 1, 2, 3]),
                _core.SegmentRequest(other, [9, 8, 7], [-1, 0, 0], [0, 1, 2]),
            ]
        )
    )
    caches = {n: c.view(torch.uint8) for n, c in engine.caches.items() if n.startswith("model")}
    assert len(caches) == 12  # six layers' keys and values
    before = {name: cache.clone() for name, cache in caches.items()}
    commits = [_core.Commit(one, [0, 2, 3]), _core.Commit(other, [0, 2])]
    engine.commit(commits)
    for name, cache in caches.items():
        # Request 5's slots 2 and 3 to 1 and 2; request 6's slot 3 to 2.
        assert torch.equal(cache[9, 1], before[name][3, 0])
        assert torch.equal(cache[3, 0], before[name][3, 1])
        assert torch.equal(cache[11, 0], before[name][11, 1])
        untouched = torch.ones(cache.shape[:2], dtype=torch.bool)
        untouched[[9, 3, 11], [1, 0, 0]] = False
        assert torch.equal(cache[untouched], before[name][untouched])
    with pytest.raises(ValueError, match="commit without a step before it"):
        engine.commit(commits)


def test_what_it_refuses(evaluated: Evaluated) -> None:
    engine, _ = evaluated
    at = _core.Sequence(7, 0, 0, list(range(8)))
    engine.step(_core.RowBatch([_core.SegmentRequest(at, [5, 6, 7], [-1, 0, 0], [2])]))
    with pytest.raises(ValueError, match="request 7: commit of row 2 after row 1 is no path"):
        engine.commit([_core.Commit(at, [0, 1, 2])])
    far = _core.Sequence(9, 0, 120, list(range(8)))
    rows = [_core.SegmentRequest(far, [1] * 8, [i - 1 for i in range(8)], list(range(8)))]
    with pytest.raises(IndexError, match="position 127, the engine has 113"):
        engine.step(_core.RowBatch(rows))
    short = _core.Sequence(9, 0, 10, [0])
    with pytest.raises(ValueError, match="request 9: 18 KV slots in 1 pages of 16"):
        engine.step(_core.RowBatch([_core.SegmentRequest(short, [1] * 8, [-1] * 8, [0])]))


def test_logits_of_rows_that_want_them(evaluated: Evaluated) -> None:
    engine, _ = evaluated
    at, other = _core.Sequence(1, 0, 0, [3]), _core.Sequence(2, 3, 0, [5])
    batch = _core.RowBatch(
        [
            _core.SegmentRequest(other, [9], [-1], [0], False),
            _core.SegmentRequest(at, [5, 6], [-1, 0], [0, 1], True),
        ]
    )
    result = engine.step(batch)
    logits = result.logits.reshape(2, DEMO_VOCAB)
    assert result.argmax[1:].tolist() == logits.argmax(-1).tolist()


def test_log_probs_of_a_whole_prompt(evaluated: Evaluated) -> None:
    """More output rows than trees ever have; a position's log-prob is its row's, in any chunk."""
    engine, executables = evaluated
    prompt = (prompts(1)[0] * 20)[:75]
    executor = Executor(engine)
    executor.enqueue_request(Request(prompt, max_tokens=1, output=OutputConfig(0, 0)))
    (response,) = executor.await_responses()
    assert len(response.prompt_log_probs) == 74
    assert executables["target.rank0.engine"].runs[-1][1]["output_rows"] == (1, 80)
    at = _core.Sequence(1, 0, 0, list(range(5)))
    wanted = [10, 73]
    chain = [i - 1 for i in range(74)]
    result = engine.step(
        _core.RowBatch([_core.SegmentRequest(at, prompt[:74], chain, wanted, True)])
    )
    logits = torch.tensor(result.logits).reshape(2, -1).double()
    for row, expected in zip(wanted, logits.log_softmax(-1), strict=True):
        found = response.prompt_log_probs[row].log_prob
        assert found == pytest.approx(float(expected[prompt[row + 1]]), abs=1e-5)


def test_nan_is_an_error_that_says_where(evaluated: Evaluated) -> None:
    engine, executables = evaluated
    weight = executables["target.rank0.engine"].evaluator.fixed["model.norm/weight"]
    saved = weight.clone()
    weight.fill_(float("nan"))
    at = _core.Sequence(1, 0, 0, [0])
    try:
        with pytest.raises(FloatingPointError, match="NaN in the logits of output row 0"):
            engine.step(_core.RowBatch([_core.SegmentRequest(at, [5], [-1], [0])]))
    finally:
        weight.copy_(saved)


def test_sizes_are_few_and_never_too_small() -> None:
    sizes = {rounded_up(size, 512) for size in range(1, 513)}
    assert len(sizes) == 25
    assert all(rounded_up(size, 512) >= size for size in range(1, 513))
    assert rounded_up(70, 71) == 71
    assert rounded_up(9, 8) == 9  # more than the engine takes, which the run refuses
