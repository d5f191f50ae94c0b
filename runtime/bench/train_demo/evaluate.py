"""Figures of the exported pair on held-out conversations.

A draft is accepted as far as the target's own continuation follows it, so acceptance is read
off continuations made by plain decoding: the same tokens that a lossless verifier would emit,
round by round, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trtree.plugins.ddtree.tree import build_tree_from_top_k

from .data import Document, prompt_text, seen_in_training, window_keys
from .rollouts import STOPS
from .trace import Continuation, Draft, Tracer

BUDGETS = (8, 16, 32, 64)
COLUMNS = ("chain", *(f"tree {b}" for b in BUDGETS))
CONTINUATION = 192
SEEDS = (101, 102, 103)
REAL_POINTS = 3

Lengths = NDArray[np.int64]


def accepted(draft: Draft, truth: Sequence[int]) -> Lengths:
    """Accepted draft tokens if the target goes on with `truth`, for each of COLUMNS."""
    tree = build_tree_from_top_k(draft.log_probs, draft.token_ids, max(BUDGETS))
    ahead = np.full(len(draft.token_ids) + 1, -1)
    ahead[: min(len(truth), len(ahead))] = truth[: len(ahead)]
    rows, _ = tree.walk(np.append(ahead[0], ahead[tree.depths]))
    chain = 0
    while chain < len(draft.token_ids) and draft.token_ids[chain, 0] == ahead[chain]:
        chain += 1
    # A smaller budget's tree is the beginning of a larger one's.
    return np.array([chain, *(np.count_nonzero(rows[1:] <= budget) for budget in BUDGETS)])


def count_rounds(lengths: Sequence[Lengths], tokens: int) -> NDArray[np.float64]:
    """(tokens, passes) for each of COLUMNS, [2, columns], of decoding `tokens` tokens.

    lengths[i] is what a round whose seed is token i accepts. The first token comes with the
    prompt; the last is no seed.
    """
    counts = np.zeros((2, len(COLUMNS)))
    for column in range(len(COLUMNS)):
        seed = passes = 0
        while seed < tokens - 1:
            seed += min(int(lengths[seed][column]) + 1, tokens - 1 - seed)
            passes += 1
        counts[:, column] = tokens - 1, passes
    return counts


@dataclass(frozen=True)
class Run:
    """One seed's figures; rates are tokens per target pass, by COLUMNS."""

    rates: NDArray[np.float64]
    repeated: float
    seen: float
    tokens: float
    right: float


def lengths_of(continuation: Continuation) -> list[Lengths]:
    """What the round of every seed accepts."""
    tokens = continuation.tokens
    return [accepted(draft, tokens[i + 1 :]) for i, draft in enumerate(continuation.drafts)]


def continuation_run(
    tracer: Tracer,
    documents: list[Document],
    windows: NDArray[np.uint64],
    rng: np.random.Generator | None,
) -> Run:
    """Answer every question and count the rounds; greedy without `rng`."""
    counts = np.zeros((2, len(COLUMNS)))
    repeated = total = right = 0
    seen: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    for document in documents:
        tracer.reset()
        prompt = document.ids[: document.answer]
        done = tracer.go_on(prompt, CONTINUATION, STOPS, rng, drafts=CONTINUATION)
        counts += count_rounds(lengths_of(done), len(done.tokens))
        keys = window_keys(done.tokens)
        repeated, total = repeated + len(keys) - len(np.unique(keys)), total + len(keys)
        seen.append(seen_in_training(done.tokens, windows))
        lengths.append(len(done.tokens))
        right += done.tokens == document.ids[document.answer :][: len(done.tokens)]
    return Run(
        counts[0] / counts[1],
        repeated / max(total, 1),
        float(np.concatenate(seen).mean()),
        float(np.mean(lengths)),
        right / len(documents),
    )


def real_run(
    tracer: Tracer, documents: list[Document], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Mean tokens of one greedy round, by COLUMNS, after real text cut inside its answer."""
    rounds: list[Lengths] = []
    for document in documents:
        for cut in rng.integers(document.answer + 1, len(document.ids) - 2, REAL_POINTS):
            tracer.reset()
            done = tracer.go_on(document.ids[:cut], 9, STOPS, drafts=1)
            rounds += [length + 1 for length in lengths_of(done)]
    return np.asarray(np.mean(rounds, axis=0))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over the seeds."""
    return {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1))}


def _rates(found: Sequence[NDArray[np.float64]]) -> dict[str, dict[str, float]]:
    return {name: spread([row[i] for row in found]) for i, name in enumerate(COLUMNS)}


def evaluate(
    tracer: Tracer, held_out: list[Document], windows: NDArray[np.uint64], prompts: int
) -> dict[str, dict[str, object]]:
    """Figures of one precision of the target: greedy, sampled and after real text.

    Each of SEEDS draws `prompts` conversations.
    """
    runs: dict[str, list[Run]] = {"greedy": [], "sampled": []}
    real: list[NDArray[np.float64]] = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        picks = rng.choice(len(held_out), size=prompts, replace=False)
        documents = [held_out[i] for i in picks]
        runs["greedy"].append(continuation_run(tracer, documents, windows, None))
        runs["sampled"].append(continuation_run(tracer, documents, windows, rng))
        real.append(real_run(tracer, documents, rng))
    figures: dict[str, dict[str, object]] = {
        name: {
            "tokens_per_pass": _rates([run.rates for run in group]),
            "repeated_8grams": spread([run.repeated for run in group]),
            "8grams_in_training": spread([run.seen for run in group]),
            "tokens": spread([run.tokens for run in group]),
            "right": spread([run.right for run in group]),
        }
        for name, group in runs.items()
    }
    figures["real text"] = {"tokens_per_pass": _rates(real)}
    return figures


def answers(tracer: Tracer, tokenizer: Tokenizer, questions: Sequence[str]) -> dict[str, str]:
    """The greedy answer to each question."""
    found = {}
    for question in questions:
        tracer.reset()
        ids = tokenizer.encode(prompt_text(question, plain=False)).ids
        found[question] = tokenizer.decode(tracer.go_on(ids, CONTINUATION, STOPS).tokens)
    return found
