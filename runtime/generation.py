"""One output on its way: what was asked for, and what its rounds add to it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trtree.runtime.executor import (
    FinishReason,
    Request,
    RequestStatistics,
    Response,
    TokenLogProbs,
)
from trtree.runtime.output_text import OutputText
from trtree.runtime.tokenizer import Tokenizer

_REASONS: dict[FinishReason, Literal["stop", "length", "cancelled"]] = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}


@dataclass(frozen=True)
class Submission:
    """One output to generate.

    Args:
        stop: strings that end the output; they are no part of it.
        echo: the prompt's text, if the output is to begin with it (and, with
            ``request.output.prompt_log_probs``, its tokens).
        score_only: the prompt alone is wanted; one token is decoded and dropped.
    """

    request: Request
    stop: Sequence[str] = ()
    echo: str | None = None
    score_only: bool = False


@dataclass(frozen=True)
class TokenText:
    """A token with its own text, the offset of that in the output, and its log-probs.

    ``log_probs`` is None for a prompt's first token, which follows nothing.
    """

    token_id: int
    text: str
    offset: int
    log_probs: TokenLogProbs | None


@dataclass(frozen=True)
class Usage:
    """A request's counts. ``statistics`` is None where it never reached an engine."""

    prompt_tokens: int
    completion_tokens: int
    statistics: RequestStatistics | None


@dataclass(frozen=True)
class Finish:
    """How an output ended: ``stop`` is the string or token id found, ``error`` what failed."""

    reason: Literal["stop", "length", "cancelled", "error"]
    usage: Usage
    stop: str | int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Chunk:
    """What one round added to an output; text may lag behind its tokens."""

    text: str
    token_ids: list[int]
    tokens: list[TokenText]  # where log-probs were asked for
    finish: Finish | None = None


@dataclass(frozen=True)
class Finished:
    """What observers are told of each request. Times are ``time.monotonic`` seconds."""

    submitted: float
    first_token: float | None
    finished: float
    finish: Finish


OnChunk = Callable[[Chunk], None]


class Generation:
    """A submission on its way. Chunks come from another thread."""

    def __init__(self, submission: Submission, tokenizer: Tokenizer, on_chunk: OnChunk) -> None:
        self.submission = submission
        self.submitted = time.monotonic()
        self._tokenizer = tokenizer
        self._on_chunk = on_chunk
        self._log_probs = submission.request.output.log_probs >= 0
        self._text = OutputText(tokenizer, submission.stop, offsets=self._log_probs)
        self._echo = submission.echo or ""
        self._statistics: RequestStatistics | None = None
        self._completion_tokens = 0
        self._first_token: float | None = None
        self._started = False

    def on_response(self, response: Response) -> Finished | None:
        """Pass on what a response adds; what observers are told if it is the last."""
        self._statistics = response.statistics
        token_ids = [] if self.submission.score_only else list(response.token_ids)
        stopped = response.finish_reason == FinishReason.STOP_TOKEN
        # A stop token counts, but is no part of the text.
        shown = token_ids[:-1] if stopped else token_ids
        piece = self._text.push(shown)
        text, stop = piece.text, piece.stop
        if stop is not None:
            token_ids = token_ids[: piece.used]
        elif response.finished:
            rest, stop = self._text.finish()
            text += rest
        if token_ids and self._first_token is None:
            self._first_token = time.monotonic()
        self._completion_tokens += len(token_ids)
        tokens = self._tokens(token_ids, piece.offsets, response)
        if not self._started:
            self._started, text = True, self._echo + text
        reason = "stop" if stop is not None else _REASONS.get(response.finish_reason)
        if reason is None:
            if text or token_ids:
                self._on_chunk(Chunk(text, token_ids, tokens))
            return None
        end = stop if stop is not None or not stopped else response.token_ids[-1]
        if self.submission.score_only and reason == "stop":
            reason, end = "length", None
        return self._finish(Finish(reason, self.usage, end), Chunk(text, token_ids, tokens))

    def fail(self, error: str) -> Finished:
        """End with an error."""
        return self._finish(Finish("error", self.usage, error=error), Chunk("", [], []))

    @property
    def usage(self) -> Usage:
        prompt = len(self.submission.request.prompt_token_ids)
        return Usage(prompt, self._completion_tokens, self._statistics)

    def _finish(self, finish: Finish, chunk: Chunk) -> Finished:
        finished = Finished(self.submitted, self._first_token, time.monotonic(), finish)
        self._on_chunk(replace(chunk, finish=finish))
        return finished

    def _tokens(
        self, token_ids: list[int], offsets: list[int], response: Response
    ) -> list[TokenText]:
        tokens = []
        request = self.submission.request
        if not self._started and self.submission.echo is not None:
            log_probs = list(response.prompt_log_probs)
            if request.output.prompt_log_probs >= 0:
                tokens = self._prompt_tokens(log_probs)
        if self._log_probs:
            start, end = len(self._echo), len(self._echo) + self._text.length
            for i, token_id in enumerate(token_ids):
                offset = start + offsets[i] if i < len(offsets) else end
                text = self._tokenizer.token_text(token_id)
                tokens.append(TokenText(token_id, text, offset, response.log_probs[i]))
        return tokens

    def _prompt_tokens(self, log_probs: list[TokenLogProbs]) -> list[TokenText]:
        ids = list(self.submission.request.prompt_token_ids)
        offsets = OutputText(self._tokenizer, (), offsets=True).push(ids).offsets
        texts = [self._tokenizer.token_text(token_id) for token_id in ids]
        with_first: list[TokenLogProbs | None] = [None, *log_probs]
        return [TokenText(*token) for token in zip(ids, texts, offsets, with_first, strict=True)]
