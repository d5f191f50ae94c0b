"""Sampling, log-probs and policies through the server."""

import math
from typing import Any

import pytest

from server import ServerProcess

PROMPT = "Tell a story:"  # its names are open


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    return server.complete(**({"prompt": PROMPT, "max_tokens": 24} | body))


def test_a_seed_gives_the_same_text_in_every_mode(server: ServerProcess) -> None:
    texts = []
    for mode in ("plain", "chain", "tree"):
        answer = complete(
            server, temperature=1.0, top_p=0.95, seed=11, n=3, speculative={"mode": mode}
        )
        texts.append([choice["text"] for choice in answer["choices"]])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 3, "choices draw independently"
    (alone,) = complete(server, temperature=1.0, top_p=0.95, seed=11)["choices"]
    assert alone["text"] == texts[0][0]


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_log_probs_are_of_the_tokens_shown(server: ServerProcess, mode: str) -> None:
    """Pitfall 23: accepted rows are not contiguous."""
    answer = complete(server, logprobs=3, echo=True, speculative={"mode": mode})
    (choice,) = answer["choices"]
    figures = choice["logprobs"]
    assert "".join(figures["tokens"]) == choice["text"]
    at = 0
    for token, offset in zip(figures["tokens"], figures["text_offset"], strict=True):
        assert (offset, choice["text"][offset : offset + len(token)]) == (at, token)
        at += len(token)
    assert figures["token_logprobs"][0] is figures["top_logprobs"][0] is None
    prompt_tokens = answer["usage"]["prompt_tokens"]
    for i in range(1, len(figures["tokens"])):
        own, top = figures["token_logprobs"][i], figures["top_logprobs"][i]
        assert own <= 0
        assert 3 <= len(top) <= 4
        assert top[figures["tokens"][i]] == own
        assert sum(map(math.exp, top.values())) <= 1 + 1e-5
        if i >= prompt_tokens:  # greedy
            assert own == max(top.values())
    scored = complete(server, prompt=choice["text"], logprobs=1, echo=True, max_tokens=0)
    assert scored["choices"][0]["text"] == choice["text"]
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        figures["token_logprobs"][1:], abs=1e-4
    )


@pytest.mark.parametrize("policy", ["load", "adaptive"])
def test_policies_change_no_text(server: ServerProcess, policy: str) -> None:
    (expected,) = complete(server, speculative={"mode": "plain"})["choices"]
    speculative = {"mode": "tree", "policy": policy, "chain_seed": True}
    assert complete(server, speculative=speculative)["choices"] == [expected]


def test_a_repeated_prompt_is_cached(server: ServerProcess) -> None:
    prompt = "An order that was placed for this test alone. " * 8
    first, second = (complete(server, prompt=prompt) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.metrics("cached_prompt_tokens_total")[0] > 0
    assert server.used_pages() == 0, "what only the cache holds is not in use"
