"""Completions and streams: the text is what the engine generates without a server."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from engines import DEMO_PROMPTS
from server import ServerProcess
from trtree.runtime.session import Session

PROMPTS = (*DEMO_PROMPTS[:2], "The ☃ of")


@pytest.fixture
def client(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    "speculative",
    [{}, {"mode": "plain"}, {"mode": "chain"}, {"mode": "tree", "tree_budget": 5}],
    ids=str,
)
def test_text_is_the_engines(
    server: ServerProcess, expected: Callable[..., str], speculative: dict[str, Any]
) -> None:
    answer = server.complete(
        prompt=list(PROMPTS), max_tokens=40, **({"speculative": speculative} if speculative else {})
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [expected(prompt, 40) for prompt in PROMPTS]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 120
    assert usage["total_tokens"] == usage["prompt_tokens"] + 120
    figures = usage["speculative"]
    # The first token of each comes from its prompt's pass.
    assert figures["acceptance_length"] == pytest.approx(117 / figures["verify_forwards"])
    assert (figures["drafted_tokens"] == 0) == (speculative.get("mode") == "plain")


def test_openai_client_streams(
    server: ServerProcess, client: OpenAI, expected: Callable[..., str]
) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    stream = client.completions.create(
        model="demo",
        prompt=PROMPTS[0],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert "".join(p.choices[0].text for p in parts if p.choices) == expected(PROMPTS[0], 64)
    assert [p.choices[0].finish_reason for p in parts[:-1]] == [None] * (len(parts) - 2) + [
        "length"
    ]
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 64
    assert len(parts) > 4, "tokens come as they are found"


def test_a_stream_is_events_that_end_in_done(server: ServerProcess) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "stream": True, "n": 2}
    response = server.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    texts = ["", ""]
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts[0] == texts[1] != ""


def test_token_id_prompts(server: ServerProcess, demo_session: Callable[..., Session]) -> None:
    encode = demo_session().tokenizer.encode
    as_text = server.complete(prompt=list(PROMPTS), max_tokens=12)["choices"]
    as_ids = server.complete(prompt=[encode(p) for p in PROMPTS], max_tokens=12)["choices"]
    assert as_ids == as_text
    alone = server.complete(prompt=encode(PROMPTS[1]), max_tokens=12)["choices"]
    assert alone[0]["text"] == as_text[1]["text"]


def test_echo(server: ServerProcess, expected: Callable[..., str]) -> None:
    (choice,) = server.complete(prompt=PROMPTS[2], max_tokens=8, echo=True)["choices"]
    assert choice["text"] == PROMPTS[2] + expected(PROMPTS[2], 8)
    answer = server.complete(prompt=PROMPTS[2], max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == PROMPTS[2]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("mode", ["plain", "tree"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(
    server: ServerProcess, expected: Callable[..., str], mode: str, stream: bool
) -> None:
    """Cut at the string wherever tokens and accepted paths end; usage up to its token."""
    whole = expected(PROMPTS[0], 64)
    stop = whole[42:48]  # begins and ends inside tokens
    body: dict[str, Any] = {
        "prompt": PROMPTS[0],
        "max_tokens": 64,
        "stop": [stop, "never found"],
        "speculative": {"mode": mode},
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = server.http.post("/v1/completions", json=body).text.split("\n\n")[:-2]
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
        text = "".join(part["choices"][0]["text"] for part in parts[:-1])
        reason, usage = parts[-2]["choices"][0]["finish_reason"], parts[-1]["usage"]
    else:
        answer = server.complete(**body)
        text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        usage = answer["usage"]
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"
    up_to = server.complete(
        prompt=PROMPTS[0], max_tokens=usage["completion_tokens"], speculative={"mode": "plain"}
    )
    assert stop in up_to["choices"][0]["text"]
    one_less = server.complete(prompt=PROMPTS[0], max_tokens=usage["completion_tokens"] - 1)
    assert stop not in one_less["choices"][0]["text"]


def test_stop_token_ids(server: ServerProcess, demo_session: Callable[..., Session]) -> None:
    tokenizer = demo_session().tokenizer
    plain = server.complete(prompt=PROMPTS[0], max_tokens=32)["choices"][0]["text"]
    stop = tokenizer.encode(plain)[9]
    answer = server.complete(prompt=PROMPTS[0], max_tokens=32, stop_token_ids=[stop])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert plain.startswith(choice["text"])
    assert len(tokenizer.encode(choice["text"])) == answer["usage"]["completion_tokens"] - 1


def test_ignore_eos(server: ServerProcess) -> None:
    """The demo's answers end; with ignore_eos the engine goes on."""
    prompt = DEMO_PROMPTS[-1]
    ended = server.complete(prompt=prompt, max_tokens=1000)
    assert ended["choices"][0]["finish_reason"] == "stop"
    length = ended["usage"]["completion_tokens"]
    went_on = server.complete(prompt=prompt, max_tokens=length + 50, ignore_eos=True)
    assert went_on["choices"][0]["finish_reason"] == "length"
    assert went_on["usage"]["completion_tokens"] == length + 50


def test_the_prefix_of_a_stream_is_never_taken_back(
    server: ServerProcess, expected: Callable[..., str]
) -> None:
    """Text that may begin a stop string waits until it is certain."""
    whole = expected(PROMPTS[1], 48)
    almost = [whole[i : i + 6] + "\u2620" for i in range(0, 42, 3)]  # each begins, none completes
    body = {"prompt": PROMPTS[1], "max_tokens": 48, "stop": almost, "stream": True}
    events = server.http.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == whole
    assert parts[-1]["finish_reason"] == "length"
