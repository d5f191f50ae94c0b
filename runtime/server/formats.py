"""Answers as OpenAI's clients expect them."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from trtree.runtime.executor import TokenLogProbs
from trtree.runtime.server.outputs import Output
from trtree.runtime.service import Chunk, TokenText, Usage
from trtree.runtime.tokenizer import Tokenizer

LEAST_LOG_PROB = -9999.0  # JSON has no infinity


class Format(Protocol):
    """One kind of answer, whole or in parts."""

    def parts(self, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """What a stream sends for a chunk."""

    def whole(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]: ...
    def usage_part(self, usage: dict[str, Any]) -> dict[str, Any]:
        """A stream's last part, if the client asked for it."""


class _Answer:
    """What all parts of an answer have in common."""

    def __init__(self, prefix: str, model: str, tokenizer: Tokenizer, *, log_probs: bool) -> None:
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._log_probs = log_probs

    def _answer(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _top(self, log_probs: TokenLogProbs) -> list[tuple[int, str, float]]:
        return [(token, self._tokenizer.token_text(token), value) for token, value in log_probs.top]


class CompletionFormat(_Answer):
    """``text_completion``."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, log_probs: bool) -> None:
        super().__init__("cmpl", model, tokenizer, log_probs=log_probs)

    def parts(self, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if chunk.text or chunk.tokens or chunk.finish:
            reason = chunk.finish.reason if chunk.finish else None
            choice = self._choice(index, chunk.text, chunk.tokens, reason)
            yield self._answer("text_completion", [choice])

    def whole(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            self._choice(i, out.text, out.tokens, out.finish.reason if out.finish else None)
            for i, out in enumerate(outputs)
        ]
        return self._answer("text_completion", choices, usage=usage)

    def usage_part(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._answer("text_completion", [], usage=usage)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenText], reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._log_probs else None,
            "finish_reason": reason,
        }

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [t.log_probs and _number(t.log_probs.log_prob) for t in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _alternatives(self, token: TokenText) -> dict[str, float] | None:
        """The most probable tokens, and the token itself."""
        if token.log_probs is None:
            return None
        top: dict[str, float] = {}
        for _, text, value in self._top(token.log_probs):
            top.setdefault(text, _number(value))
        top.setdefault(token.text, _number(token.log_probs.log_prob))
        return top


class ChatFormat(_Answer):
    """``chat.completion`` and its chunks."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, log_probs: bool) -> None:
        super().__init__("chatcmpl", model, tokenizer, log_probs=log_probs)
        self._begun: set[int] = set()

    def parts(self, index: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._part(index, {"role": "assistant", "content": ""}, [])
        if chunk.text or chunk.tokens:
            yield self._part(index, {"content": chunk.text}, chunk.tokens)
        if chunk.finish:
            yield self._part(index, {}, [], chunk.finish.reason)

    def whole(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.tokens),
                "finish_reason": output.finish.reason if output.finish else None,
            }
            for index, output in enumerate(outputs)
        ]
        return self._answer("chat.completion", choices, usage=usage)

    def usage_part(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._answer("chat.completion.chunk", [], usage=usage)

    def _part(
        self,
        index: int,
        delta: dict[str, str],
        tokens: Sequence[TokenText],
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": reason,
        }
        return self._answer("chat.completion.chunk", [choice])

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._log_probs:
            return None
        content = [
            _token(token.text, token.log_probs.log_prob)
            | {"top_logprobs": [_token(text, v) for _, text, v in self._top(token.log_probs)]}
            for token in tokens
            if token.log_probs is not None
        ]
        return {"content": content, "refusal": None}


def usage_of(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """The counts of all outputs; a prompt counts once, however many outputs it has."""
    known = [usage.statistics for usage in usages if usage.statistics is not None]
    prompts = usages[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    verify_forwards = sum(s.verify_forwards for s in known)
    decoded_tokens = sum(s.decoded_tokens for s in known)
    cached = sum(usage.statistics.cached_tokens for usage in prompts if usage.statistics)
    speculative: dict[str, Any] = {
        "acceptance_length": decoded_tokens / verify_forwards if verify_forwards else None,
        "drafted_tokens": sum(s.drafted_tokens for s in known),
        "accepted_tokens": sum(s.accepted_tokens for s in known),
        "verify_forwards": verify_forwards,
    }
    if any(s.inexact_tree_state for s in known):
        speculative["inexact_tree_state"] = True
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculative": speculative,
    }


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _number(log_prob), "bytes": list(text.encode())}


def _number(log_prob: float) -> float:
    return max(log_prob, LEAST_LOG_PROB)
