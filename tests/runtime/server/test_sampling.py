"""Sampling, log-probs and policies through the server."""

import math
from typing import Any

import pytest

from server import ServerProcess

PROMPT = "Permission is hereby granted, free of"


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 24} | body)
    if response.status_code == 400 and "not supported yet" in response.text:
        pytest.skip(response.json()["error"]["message"])
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


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
    prompt = "A licence that was written for this test alone. " * 8
    first, second = (complete(server, prompt=prompt) for _ in range(2))
    assert first["choices"] == second["choices"]
    (cached,) = server.metrics("cached_prompt_tokens_total")
    if cached == 0:
        pytest.skip("the executor has no prefix cache yet")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
