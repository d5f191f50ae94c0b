"""A language model small enough to reason about, as an Engine.

Its next token is a hash of every token before it, and it knows the past only through
its paged caches: a wrong page, slot, mask, position or commit changes the output. Its
slots may keep state too, the tokens seen there, of which a wrong one is an error.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from trtree import _core
from wrapped_engine import WrappedEngine

EMPTY = -1


def next_token(context: Sequence[int], vocab: int) -> int:
    """The target's choice after a context of token ids."""
    digest = hashlib.blake2b(np.asarray(context, dtype=np.int64).tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") % vocab


def decode(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """Plain decoding, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class ToyEngine(_core.Engine):
    """``skill``: of 8, how often the drafter's first candidate is the target's choice.

    ``state_snapshots``: places for them, of an engine with recurrent state; None: of another.
    """

    def __init__(
        self,
        *,
        vocab: int = 13,
        page_size: int = 4,
        num_pages: int = 400,
        max_batch_size: int = 8,
        max_num_rows: int = 256,
        verify_width: int = 129,
        block_size: int = 6,
        skill: int = 5,
        state_snapshots: int | None = None,
    ) -> None:
        super().__init__()
        c = _core.Capabilities()
        c.backend = "toy"
        c.page_size, c.num_pages = page_size, num_pages
        c.max_batch_size, c.max_num_rows = max_batch_size, max_num_rows
        c.max_seq_len = page_size * num_pages
        c.verify_width, c.block_size, c.max_top_k = verify_width, block_size, vocab
        c.vocab_size = vocab
        c.recurrent_state = state_snapshots is not None
        c.state_snapshots = state_snapshots or 0
        self.c = c
        self.states: list[list[int]] = [[] for _ in range(max_batch_size)]  # by slot
        self.snapshots: list[list[int]] = [[] for _ in range(c.state_snapshots)]
        self.skill = skill
        self.target_cache = np.full((num_pages, page_size), EMPTY)
        self.drafter_cache = np.full((num_pages, page_size), EMPTY)
        self.batches: list[_core.RowBatch] = []  # every step seen
        self.drafts: list[int] = []  # requests in each drafter pass

    def capabilities(self) -> _core.Capabilities:
        return self.c

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        self.batches.append(batch)
        assert batch.num_rows <= self.c.max_num_rows
        assert len({s.sequence.slot for s in batch.segments}) == len(batch.segments)
        self._check_pages([s.sequence for s in batch.segments])
        mask = batch.packed_mask.reshape(-1, batch.mask_words)
        choices = {}
        for segment in batch.segments:
            self._check_state(segment.sequence)
            rows = range(segment.num_rows)
            slots = [
                self._slot(segment.sequence, segment.sequence.committed_length + i) for i in rows
            ]
            for i in rows:
                self.target_cache[slots[i]] = batch.token_ids[segment.first_row + i]
            for i in rows:
                words = mask[segment.first_row + i]
                seen = [j for j in rows if int(words[j // 32]) >> (j % 32) & 1]
                context = self._read(self.target_cache, segment.sequence)
                context += [int(self.target_cache[slots[j]]) for j in seen]
                assert batch.positions[segment.first_row + i] == len(context) - 1
                choices[segment.first_row + i] = next_token(context, self.c.vocab_size)
        argmax = [choices[row] for row in batch.output_rows.tolist()]
        return _core.StepResult(np.array(argmax, np.int32), np.zeros(0, np.float32))

    def commit(self, commits: Sequence[_core.Commit]) -> None:
        for commit in commits:
            at, rows = commit.sequence, commit.rows.tolist()
            tokens = [int(self.target_cache[self._slot(at, at.committed_length + r)]) for r in rows]
            for i, token in enumerate(tokens):
                slot = self._slot(at, at.committed_length + i)
                self.target_cache[slot] = token
                if commit.extend_drafter:
                    self.drafter_cache[slot] = token
            state = self.states[at.slot][: at.committed_length] + tokens
            self.states[at.slot] = state
            for save in commit.saves:
                assert 0 < save.rows <= len(rows)
                end = at.committed_length + save.rows
                assert end % self.c.page_size == 0
                self.snapshots[save.snapshot] = state[:end]

    def load_state(self, snapshot: int, slot: int) -> None:
        self.states[slot] = list(self.snapshots[snapshot])

    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        self.drafts.append(len(requests))
        depth, vocab = self.c.block_size - 1, self.c.vocab_size
        log_probs = np.zeros((len(requests), depth, top_k), np.float32)
        ids = np.zeros((len(requests), depth, top_k), np.int32)
        for index, request in enumerate(requests):
            context = self._read(self.drafter_cache, request.sequence)
            assert EMPTY not in context, "the drafter's context has a hole"
            context.append(request.bonus_token)
            for d in range(depth):
                token = next_token(context, vocab)
                context.append(token)
                miss = next_token([*context, 1], 8) >= self.skill
                order = [(token + miss + k) % vocab for k in range(top_k)]
                ids[index, d] = order
                log_probs[index, d] = np.log(0.6) * (np.arange(top_k) + 1)
        return _core.DraftResult(log_probs, ids)

    def _check_state(self, sequence: _core.Sequence) -> None:
        if self.c.recurrent_state and sequence.committed_length:
            context = self._read(self.target_cache, sequence)
            assert self.states[sequence.slot] == context, "the slot's state is another's"

    def _check_pages(self, sequences: Sequence[_core.Sequence]) -> None:
        """Requests may share pages of committed tokens, and no page that is written to."""
        size = self.c.page_size
        written = [p for s in sequences for p in s.pages.tolist()[s.committed_length // size :]]
        read = {p for s in sequences for p in s.pages.tolist()[: s.committed_length // size]}
        assert len(written) == len(set(written)), "two requests write to one page"
        assert not read & set(written), "a request writes to a page that another one reads"

    def _slot(self, sequence: _core.Sequence, slot: int) -> tuple[int, int]:
        page = int(sequence.pages[slot // self.c.page_size])
        return page, slot % self.c.page_size

    def _read(self, cache: np.ndarray, sequence: _core.Sequence) -> list[int]:
        slots = cache[sequence.pages].reshape(-1)
        return slots[: sequence.committed_length].tolist()


class ToyLogits(WrappedEngine):
    """A toy engine's choices as logits: ``HEIGHT`` for the choice, 0 for all other tokens.

    ``nan_at_step``: the step, from 1, whose later rows are not numbers.
    """

    HEIGHT = 8.0

    def __init__(self, engine: ToyEngine, *, nan_at_step: int = 0) -> None:
        super().__init__(engine)
        self.left = nan_at_step

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        argmax = self.engine.step(batch).argmax
        logits = np.zeros((len(argmax), self.capabilities().vocab_size), np.float32)
        logits[np.arange(len(argmax)), argmax] = self.HEIGHT
        self.left -= 1
        if self.left == 0:
            logits[len(argmax) // 2 :, 0] = np.nan
        return _core.StepResult(argmax, logits.reshape(-1))
