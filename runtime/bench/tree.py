"""Time to build a draft tree from logits, top-k included, and from given top-k log-probs.

Each budget is timed beside the reference in Python. Before that the trees, and the
log-probs under them, are checked to be equal; if they are not, nothing is timed. The
logits stay in the processor's cache between calls where they fit, as they do when the
drafter has just written them. Times are in microseconds.
"""

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtree._core import ddtree as core
from trtree.plugins.ddtree import build_tree, build_tree_from_top_k, reference, top_k_log_probs
from trtree.runtime.cli import integer, positive, threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--vocab", type=positive, default=151_936, help="default: %(default)s (Qwen3)"
    )
    parser.add_argument(
        "--depth", type=positive, default=15, help="block size - 1; default: %(default)s"
    )
    parser.add_argument(
        "--budgets",
        type=positive,
        nargs="+",
        default=[16, 64, 256, 1024],
        metavar="N",
        help="nodes besides the root; default: 16 64 256 1024",
    )
    parser.add_argument(
        "--threads", type=threads, nargs="+", default=[1, 2], metavar="N", help="default: 1 2"
    )
    parser.add_argument(
        "--repeats", type=positive, default=200, help="timed calls of each; default: %(default)s"
    )
    parser.add_argument(
        "--reference-repeats",
        type=positive,
        default=3,
        help="timed calls of the reference; default: %(default)s",
    )
    parser.add_argument(
        "--seed", type=integer(0), default=0, help="of the logits; default: %(default)s"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Raises RuntimeError where the builder and the reference disagree."""
    logits = drafter_like_logits(args.depth, args.vocab, args.seed)
    results = [
        _measure(logits, budget, args.threads, args.repeats, args.reference_repeats)
        for budget in args.budgets
    ]
    return {
        "vocab": args.vocab,
        "depth": args.depth,
        "repeats": args.repeats,
        "unit": "microseconds",
        "machine": platform.machine(),
        "kernel": core.scan_row(logits[0])[0][0],
        "results": results,
    }


def drafter_like_logits(depth: int, vocab: int, seed: int) -> npt.NDArray[np.float32]:
    """float32 [depth, vocab]: a bell with a few likely tokens, flatter with depth."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 2.0, (depth, vocab)).astype(np.float32)
    likely = min(8, vocab)
    for d, row in enumerate(logits):
        tokens = rng.choice(vocab, likely, replace=False)
        row[tokens] += np.float32(18.0 - 0.5 * d) - 1.5 * np.arange(likely, dtype=np.float32)
    return logits


def _measure(
    logits: npt.NDArray[np.float32],
    budget: int,
    threads: Sequence[int],
    repeats: int,
    reference_repeats: int,
) -> dict[str, Any]:
    log_probs, token_ids = top_k_log_probs(logits, min(budget, logits.shape[1]))
    check(logits, log_probs, token_ids, budget)

    def from_logits(num_threads: int) -> dict[str, float]:
        return _times(lambda: build_tree(logits, budget, num_threads=num_threads), repeats)

    def by_reference() -> None:
        reference.build_tree(*reference.top_k_log_probs(logits, log_probs.shape[1]), budget)

    return {
        "budget": budget,
        "from_logits": [{"threads": n} | from_logits(n) for n in threads],
        "from_top_k": _times(lambda: build_tree_from_top_k(log_probs, token_ids, budget), repeats),
        "reference_from_logits": _times(by_reference, reference_repeats),
        "reference_from_top_k": _times(
            lambda: reference.build_tree(log_probs, token_ids, budget), reference_repeats
        ),
    }


def check(
    logits: npt.NDArray[np.float32],
    log_probs: npt.NDArray[np.float32],
    token_ids: npt.NDArray[np.int32],
    budget: int,
) -> None:
    """Raises RuntimeError where top-k or tree are not the reference's."""
    expected_log_probs, expected_ids = reference.top_k_log_probs(logits, log_probs.shape[1])
    if not np.array_equal(token_ids, expected_ids):
        raise RuntimeError(f"budget {budget}: top-k ids differ from the reference's")
    # The log-sum-exp that is subtracted may differ by one step of its own size.
    lse = np.array([reference.log_sum_exp(row) for row in logits], np.float32)[:, None]
    if (np.abs(log_probs - expected_log_probs) > 2 * np.spacing(np.abs(lse))).any():
        raise RuntimeError(f"budget {budget}: log-probs differ from the reference's")
    tree = build_tree(logits, budget)
    expected = reference.build_tree(log_probs, token_ids, budget)
    if (tree.token_ids.tolist(), tree.parents.tolist()) != (expected.token_ids, expected.parents):
        raise RuntimeError(f"budget {budget}: the tree differs from the reference's")


def _times(call: Callable[[], object], repeats: int) -> dict[str, float]:
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    p10, median, p90 = np.percentile(samples, [10, 50, 90])
    return {"median": round(median, 1), "p10": round(p10, 1), "p90": round(p90, 1)}
