"""Top-k log-probs: the stable order, the exact subtraction, every kernel, any threads."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trtree._core import ddtree as core
from trtree.plugins.ddtree import build_tree, reference, top_k_log_probs


def ulps(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Distance in units of the larger one's float32 spacing."""
    spacing = np.spacing(np.maximum(np.abs(a), np.abs(b)))
    return np.abs(a.astype(np.float64) - b) / spacing


def kernel_lse(row: NDArray[np.float32]) -> np.float32:
    _, (largest, total) = core.scan_row(row)[0]
    return np.float32(largest + np.log(total))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 5000),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 3.0, 30.0, 1e4]),
    offset=st.sampled_from([0.0, 20.0, -1000.0]),
)
def test_log_sum_exp(seed: int, vocab: int, scale: float, offset: float) -> None:
    """Within one float32 step of float64 arithmetic, at the size of what is subtracted."""
    rng = np.random.default_rng(seed)
    row = (rng.normal(0, scale, vocab) + offset).astype(np.float32)
    exact = reference.log_sum_exp(row)
    step = np.spacing(np.float32(max(abs(exact), abs(float(row.max())), 1.0)))
    assert abs(float(kernel_lse(row)) - exact) <= step


def test_log_sum_exp_of_a_real_vocabulary() -> None:
    rng = np.random.default_rng(0)
    for scale in (0.5, 2.0, 5.0):
        row = rng.normal(0, scale, 151_936).astype(np.float32)
        exact = np.float32(reference.log_sum_exp(row))
        assert ulps(kernel_lse(row), exact) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6000), st.booleans())
def test_kernels_give_the_same_bits(seed: int, vocab: int, ascending: bool) -> None:
    """Ascending rows raise the running maximum in every block."""
    row = np.random.default_rng(seed).normal(0, 8, vocab).astype(np.float32)
    row[np.random.default_rng(seed).random(vocab) < 0.1] = -np.inf
    if ascending:
        row.sort()
    kernels = core.scan_row(row)
    assert kernels[-1][0] == "generic"
    assert {result for _, result in kernels} == {kernels[0][1]}


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(0, 3),
    vocab=st.integers(1, 3000),
    k=st.integers(1, 3000),
    kind=st.sampled_from(["normal", "integers", "flat", "ascending", "descending", "masked"]),
)
def test_order_and_subtraction(seed: int, depth: int, vocab: int, k: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    k = min(k, vocab)
    logits = rng.normal(0, 3, (depth, vocab)).astype(np.float32)
    if kind == "integers":  # ties everywhere, 0 and -0 among them
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 2.5
    elif kind == "ascending":
        logits.sort(axis=1)
    elif kind == "descending":
        logits = np.ascontiguousarray(np.sort(logits, axis=1)[:, ::-1])
    elif kind == "masked":  # often fewer than k are left
        logits[:, 1:][rng.random((depth, vocab - 1)) < 0.9] = -np.inf
    log_probs, ids = top_k_log_probs(logits, k)
    _, expected = reference.top_k_log_probs(logits, k)
    assert ids.dtype == np.int32
    assert log_probs.dtype == np.float32
    assert np.array_equal(ids, expected)
    lse = np.array([kernel_lse(row) for row in logits], np.float32).reshape(depth, 1)
    assert np.array_equal(log_probs, np.take_along_axis(logits, ids, axis=1) - lse)


def test_large_vocabulary_against_a_stable_sort() -> None:
    """Rounded like bfloat16 logits are, so that the last rank is tied."""
    logits = np.random.default_rng(1).normal(0, 3, (2, 151_936)).astype(np.float32)
    logits = (logits.view(np.uint32) & 0xFFFF0000).view(np.float32)
    for k in (1, 64, 1024, 2500):
        _, ids = top_k_log_probs(logits, k)
        assert np.array_equal(ids, reference.top_k_log_probs(logits, k)[1])


def test_zeros_of_both_signs_are_equal() -> None:
    logits = np.array([[-0.0, 0.0, -1.0, -0.0, 0.0]], np.float32)
    assert top_k_log_probs(logits, 5)[1].tolist() == [[0, 1, 3, 4, 2]]


def test_forbidden_tokens_rank_last_by_id() -> None:
    logits = np.array([[-np.inf, -2, -np.inf, 3, -np.inf]], np.float32)
    log_probs, ids = top_k_log_probs(logits, 5)
    assert ids.tolist() == [[3, 1, 0, 2, 4]]
    assert np.isneginf(log_probs[0, 2:]).all()
    assert log_probs[0, :2] == pytest.approx([-0.0067153, -5.0067153], abs=1e-6)


def test_only_the_last_token_is_allowed() -> None:
    """Whole blocks without a maximum come first."""
    logits = np.full((1, 10_000), -np.inf, np.float32)
    logits[0, -1] = 3
    log_probs, ids = top_k_log_probs(logits, 2)
    assert ids.tolist() == [[9999, 0]]
    assert log_probs.tolist() == [[0, -np.inf]]


def test_extreme_finite_logits() -> None:
    biggest = np.finfo(np.float32).max
    logits = np.array([[-biggest, biggest, 0, -biggest]], np.float32)
    log_probs, ids = top_k_log_probs(logits, 4)
    assert ids.tolist() == [[1, 2, 0, 3]]
    assert log_probs[0, 0] == 0
    assert log_probs[0, 1] == -biggest


def test_log_probs_never_exceed_zero() -> None:
    peaked = np.full((1, 1000), -200, np.float32)
    peaked[0, 123] = 77.7
    assert top_k_log_probs(peaked, 1)[0].tolist() == [[0.0]]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 63, 64, 2047, 2048, 4999])
@pytest.mark.parametrize("rest", [1.0, -np.inf])
def test_nan_and_inf_are_errors(bad: float, position: int, rest: float) -> None:
    logits = np.ones((4, 5000), np.float32)
    logits[2] = rest
    logits[2, position] = bad
    what = "\\+inf" if bad == np.inf else "NaN"
    for threads in (1, 3):
        with pytest.raises(ValueError, match=f"depth 2, token {position}: {what}"):
            top_k_log_probs(logits, 4, num_threads=threads)
    with pytest.raises(ValueError, match=f"depth 2, token {position}: {what}"):
        build_tree(logits, 8)


def test_the_first_bad_depth_is_named() -> None:
    logits = np.full((9, 100), np.nan, np.float32)
    logits[:3] = 0
    with pytest.raises(ValueError, match="depth 3, token 0: NaN"):
        top_k_log_probs(logits, 1, num_threads=4)


def test_a_row_without_a_token_is_an_error() -> None:
    logits = np.zeros((2, 5000), np.float32)
    logits[1] = -np.inf
    with pytest.raises(ValueError, match="depth 1: every token is -inf"):
        top_k_log_probs(logits, 1)


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match="k "):
        top_k_log_probs(np.zeros((1, 4), np.float32), k)


def test_threads_do_not_matter() -> None:
    logits = np.random.default_rng(3).normal(0, 3, (15, 20_000)).astype(np.float32)
    one = top_k_log_probs(logits, 50, num_threads=1)
    for threads in (2, 3, 8, 40, None):
        log_probs, ids = top_k_log_probs(logits, 50, num_threads=threads)
        assert np.array_equal(log_probs, one[0])
        assert np.array_equal(ids, one[1])


def test_concurrent_callers() -> None:
    """The pool serves one caller at a time; the others work on their own."""
    batches = [
        np.random.default_rng(seed).normal(0, 3, (6, 5000)).astype(np.float32) for seed in range(8)
    ]
    expected = [build_tree(logits, 40, num_threads=1).token_ids.tolist() for logits in batches]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(20):
            trees = callers.map(lambda logits: build_tree(logits, 40, num_threads=3), batches)
            assert [tree.token_ids.tolist() for tree in trees] == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_forked_child_has_no_helpers_and_does_not_wait_for_them() -> None:
    logits = np.random.default_rng(5).normal(0, 3, (6, 5000)).astype(np.float32)
    expected = build_tree(logits, 40, num_threads=3).token_ids.tolist()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        same = build_tree(logits, 40, num_threads=3).token_ids.tolist() == expected
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
