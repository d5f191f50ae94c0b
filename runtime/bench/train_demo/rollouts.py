"""Chats whose answers the quantized target wrote itself: what the drafter learns from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .data import END, IM_END, ROW, Document, Rows
from .trace import Tracer

STOPS = (END, IM_END)


def chat(
    tracer: Tracer, documents: Iterator[Document], newline: int, rng: np.random.Generator | None
) -> tuple[list[int], list[bool]]:
    """Ids, ROW at most, of questions in turn with the target's answers; whether each id is one
    of an answer's."""
    tracer.reset()
    ids: list[int] = []
    marks: list[bool] = []
    while True:
        document = next(documents)
        question = document.ids[: document.answer]
        if ids and ids[-1] == IM_END:
            question = [newline, *question]
        room = ROW - len(ids) - len(question)
        if room < 2:
            return ids, marks
        # The last token was chosen but not read.
        answer = tracer.go_on([*ids[-1:], *question], room, STOPS, rng).tokens
        ids += question + answer
        marks += [False] * len(question) + [True] * len(answer)
        if answer[-1] not in STOPS:
            return ids, marks


def shuffled(documents: list[Document], rng: np.random.Generator) -> Iterator[Document]:
    """Endless documents, every round of them in a new order."""
    while True:
        for i in rng.permutation(len(documents)):
            yield documents[i]


def make_rollouts(
    tracer: Tracer,
    documents: list[Document],
    newline: int,
    count: int,
    sampled_share: float,
    seed: int,
) -> Rows:
    """`count` chats; a share of them sampled at temperature 1, the others greedy.

    `newline` is the token that follows the end of an answer in a chat.
    """
    rng = np.random.default_rng(seed)
    questions = shuffled(documents, rng)
    ids = np.zeros((count, ROW), dtype=np.int16)
    marks = np.zeros((count, ROW), dtype=np.bool_)
    for row in range(count):
        sampled = row < sampled_share * count
        tokens, answers = chat(tracer, questions, newline, rng if sampled else None)
        ids[row, : len(tokens)] = tokens
        marks[row, : len(tokens)] = answers
    return Rows(ids, marks)
