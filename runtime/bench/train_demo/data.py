"""The text snapshot, its tokenizer, and rows of token ids."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from .text import Conversation, conversations

END, MASK, IM_START, IM_END = 0, 1, 2, 3
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>")
VOCAB = 1024
ROW = 384
WINDOW = 8
PLAIN_SHARE = 3  # one conversation in three is written without the chat's marks
QUESTION_WEIGHT = 0.1  # of a question's tokens in the loss: they are mostly chance

# Words keep no space, so that a name is the same tokens wherever it stands; a lower-case word
# keeps the one before it, and punctuation the one behind it. Digits stand alone.
PIECES = (
    r"\p{N}| ?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}\p{Ll}*|\n *"
    r"|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*(?: (?=[\p{Lu}\p{N}]))?|\s"
)


@dataclass(frozen=True)
class Snapshot:
    """The whole text."""

    training: list[Conversation]
    held_out: list[Conversation]

    def digest(self) -> str:
        """SHA-256 of every question and answer in order."""
        hashed = hashlib.sha256()
        for item in itertools.chain(self.training, self.held_out):
            hashed.update(f"{item.question}\0{item.answer}\0".encode())
        return hashed.hexdigest()


def snapshot(training: int, held_out: int) -> Snapshot:
    """That many conversations of each side."""
    return Snapshot(
        list(itertools.islice(conversations(seed=1, held_out=False), training)),
        list(itertools.islice(conversations(seed=2, held_out=True), held_out)),
    )


def prompt_text(question: str, plain: bool) -> str:
    """What stands before the answer; as the chat template renders it, or the question alone."""
    if plain:
        return question
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def answer_text(answer: str, plain: bool) -> str:
    """The answer up to its end, as it follows `prompt_text`."""
    return f"\n{answer}<|endoftext|>" if plain else f"{answer}<|im_end|>\n"


def train_tokenizer(items: list[Conversation]) -> Tokenizer:
    """Byte-level BPE with the special tokens first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(PIECES), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{c.question}\n{c.answer}" for c in items), trainer)
    return tokenizer


@dataclass(frozen=True)
class Document:
    """A conversation's ids; the answer begins at `answer`."""

    ids: list[int]
    answer: int


def encode(tokenizer: Tokenizer, items: list[Conversation]) -> list[Document]:
    """Every conversation's ids; one in PLAIN_SHARE is plain."""
    plain = [i % PLAIN_SHARE == 0 for i in range(len(items))]
    pairs = list(zip(items, plain, strict=True))
    prompts = tokenizer.encode_batch([prompt_text(c.question, p) for c, p in pairs])
    answers = tokenizer.encode_batch([answer_text(c.answer, p) for c, p in pairs])
    return [Document([*q.ids, *a.ids], len(q.ids)) for q, a in zip(prompts, answers, strict=True)]


@dataclass(frozen=True)
class Rows:
    """Packed text: ids [n, ROW] and whether each belongs to an answer [n, ROW]."""

    ids: NDArray[np.int16]
    answers: NDArray[np.bool_]


def pack(documents: list[Document]) -> Rows:
    """Rows of whole conversations, each row starting with a new one.

    What no longer fits is cut off at the row's end; a row is one long chat.
    """
    ids: list[list[int]] = []
    marks: list[list[bool]] = []
    row: list[int] = []
    mark: list[bool] = []
    for document in documents:
        row += document.ids
        mark += [i >= document.answer for i in range(len(document.ids))]
        if len(row) >= ROW:
            ids.append(row[:ROW])
            marks.append(mark[:ROW])
            row, mark = [], []
    return Rows(np.array(ids, dtype=np.int16), np.array(marks, dtype=np.bool_))


def window_keys(ids: list[int]) -> NDArray[np.uint64]:
    """64-bit keys [len - WINDOW + 1] of all WINDOW-token windows (a polynomial hash)."""
    tokens = np.asarray(ids, dtype=np.uint64)
    count = max(len(tokens) - WINDOW + 1, 0)
    keys = np.zeros(count, dtype=np.uint64)
    for offset in range(WINDOW):
        step = tokens[offset : offset + count] + np.uint64(1)
        keys = keys * np.uint64(6364136223846793005) + step
    return keys


def training_windows(documents: list[Document]) -> NDArray[np.uint64]:
    """Sorted unique window keys of every training document."""
    return np.unique(np.concatenate([window_keys(d.ids) for d in documents]))


def seen_in_training(ids: list[int], windows: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """For each window of `ids`, whether it occurs in the training text."""
    keys = window_keys(ids)
    at = np.searchsorted(windows, keys).clip(max=len(windows) - 1)
    return np.asarray(windows[at] == keys)
