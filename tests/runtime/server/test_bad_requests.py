"""Whatever a client sends, it gets an answer of OpenAI's form, and never a 5xx."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server import ServerProcess
from trtree.runtime.server.protocol import CompletionRequest

JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check(response: httpx.Response, status: int, part: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert part in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("changes", "part", "param"),
    [
        ({"prompt": None}, "Field required", "prompt"),
        ({"prompt": ""}, "prompt_token_ids is empty", None),
        ({"prompt": []}, "at least 1 item", "prompt"),
        ({"prompt": [[]]}, "prompt_token_ids is empty", None),
        ({"prompt": 7}, "valid string", "prompt"),
        ({"prompt": {"text": "a"}}, "valid string", "prompt"),
        ({"prompt": [1, "a"]}, "prompt", "prompt"),
        ({"prompt": [-1]}, "greater than or equal to 0", "prompt"),
        ({"prompt": [2**40]}, "less than or equal to", "prompt"),
        ({"prompt": [10**6]}, "prompt_token_ids holds 1000000", None),
        ({"prompt": ["a"] * 600, "n": 2}, "more than 1024 outputs", "prompt"),
        ({"prompt": "a " * 5000}, "max_seq_len 2048", None),
        ({"max_tokens": 4000}, "max_seq_len 2048", None),
        ({"max_tokens": -1}, "greater than or equal to 0", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens 0 leaves nothing to answer", "max_tokens"),
        ({"max_tokens": "8"}, "valid integer", "max_tokens"),
        ({"max_tokens": 8.5}, "valid integer", "max_tokens"),
        ({"max_tokens": True}, "valid integer", "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens"),
        ({"n": 0}, "greater than or equal to 1", "n"),
        ({"n": 129}, "less than or equal to 128", "n"),
        ({"best_of": 3}, "best_of 3 is not supported", "best_of"),
        ({"temperature": -0.1}, "greater than or equal to 0", "temperature"),
        ({"temperature": "hot"}, "valid number", "temperature"),
        ({"top_p": 0}, "greater than 0", "top_p"),
        ({"logprobs": 21}, "less than or equal to 20", "logprobs"),
        ({"logit_bias": {"x": 1}}, "'x' is no token id", "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "is no token id", "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "token 1 is given twice", "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "less than or equal to 100", "logit_bias"),
        ({"stop": ""}, "at least 1 character", "stop"),
        ({"stop": ["x"] * 33}, "at most 32 items", "stop"),
        ({"stop": "x" * 257}, "at most 256 characters", "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids holds 1000000", None),
        ({"stream": "yes"}, "valid boolean", "stream"),
        ({"stream_options": {"include": True}}, "'stream_options.include'", "stream_options"),
        ({"suffix": "x"}, "unknown parameter 'suffix'", "suffix"),
        ({"guided_json": {}}, "unknown parameter 'guided_json'", "guided_json"),
        ({"speculative": {"mode": "medusa"}}, "'plain', 'chain' or 'tree'", "speculative"),
        ({"speculative": {"budget": 3}}, "'speculative.budget'", "speculative"),
        ({"speculative": {"tree_budget": 900}}, "verify width of 901", None),
        ({"speculative": {"tree": "static"}}, "built without one", None),
        ({"seed": 2**64}, "seed", "seed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_completion_parameters(
    server: ServerProcess, changes: dict[str, Any], part: str, param: str | None
) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 4} | changes
    check(server.http.post(COMPLETIONS, json=body), 400, part, param)
    if "stream" not in changes:  # the same answer, not a stream that begins and fails
        check(server.http.post(COMPLETIONS, json=body | {"stream": True}), 400, part, param)


@pytest.mark.parametrize(
    ("changes", "part", "param"),
    [
        ({"messages": None}, "Field required", "messages"),
        ({"messages": []}, "at least 1 item", "messages"),
        ({"messages": "hi"}, "valid list", "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "'system'", "messages"),
        ({"messages": [{"role": "user"}]}, "Field required", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "", "messages"),
        ({"tools": []}, "unknown parameter 'tools'", "tools"),
        ({"response_format": {"type": "json"}}, "'response_format'", "response_format"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_chat_parameters(
    server: ServerProcess, changes: dict[str, Any], part: str, param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | changes
    check(server.http.post(CHAT, json=body), 400, part, param)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ["a", *[1] * 300_000]},
        {"prompt": [1.5] * 300_000},
        {"prompt": [None] * 300_000},
        {"prompt": [[1]] * 200_000},
        {"prompt": [1, *["a"] * 200_000]},
        {"logit_bias": {str(i): "x" for i in range(100_000)}},
        {"stop": [1] * 300_000},
        {f"parameter {i}": i for i in range(50_000)},
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_of_errors_is_answered_at_the_first(
    server: ServerProcess, changes: dict[str, Any]
) -> None:
    """One error an element takes a minute of the server, in which nobody else is served."""
    before = server.processor_seconds()
    response = server.http.post(COMPLETIONS, json={"prompt": "a"} | changes)
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert server.processor_seconds() - before < 5


@pytest.mark.parametrize(
    ("content", "headers", "part"),
    [
        (b"", JSON, "the body"),
        (b"{", JSON, "not JSON"),
        (b'{"prompt": "a",}', JSON, "not JSON"),
        (b'{"prompt": "\xff\xfe"}', JSON, "body"),
        (b'{"prompt": "\\ud800"}', JSON, "not Unicode"),
        (b'{"prompt": ["a", "\\ud800"]}', JSON, "not Unicode"),
        (b'{"prompt": "a", "\\ud800": 1}', JSON, "not Unicode"),
        (b'{"prompt": "a", "model": "\\ud800"}', JSON, "'\\ud800' is not served"),
        (b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}', JSON, "is no token id"),
        (b'{"prompt": "a", "top_p": NaN}', JSON, "top_p"),
        (b'{"prompt": "a", "temperature": 1e999}', JSON, "temperature"),
        (b'{"prompt": ' + b"[" * 100_000, JSON, "body"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", JSON, "body"),
        (b"[]", JSON, "object"),
        (b'"prompt"', JSON, "object"),
        (b"null", JSON, "the body"),
        (b"prompt=a", {"Content-Type": "application/x-www-form-urlencoded"}, "application/json"),
        (b"\x00\x01\x02", JSON, "body"),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, "application/json"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bodies(server: ServerProcess, content: bytes, headers: dict[str, str], part: str) -> None:
    for path in (COMPLETIONS, CHAT):
        response = server.http.post(path, content=content, headers=headers)
        status = 404 if b"model" in content and path == COMPLETIONS else 400
        check(response, status, part if path == COMPLETIONS else "")


def test_paths_methods_and_models(server: ServerProcess) -> None:
    check(server.http.get("/v1/nothing"), 404, "/v1/nothing does not exist")
    check(server.http.get("/health/"), 404, "/health/ does not exist")
    check(server.http.get(COMPLETIONS), 405, "does not take GET")
    check(server.http.get("/v1/models/other"), 404, "'other' is not served here", "model")
    assert server.http.get("/v1/models/demo").json()["id"] == "demo"
    body = {"model": "gpt-4", "prompt": "a"}
    check(server.http.post(COMPLETIONS, json=body), 404, "'gpt-4'", "model")


@pytest.mark.parametrize("changes", [{"prompt": "a " * 5000}, {"max_tokens": 4000}])
def test_too_long_for_the_engine(server: ServerProcess, changes: dict[str, Any]) -> None:
    """By the code that OpenAI's clients look for."""
    for path, prompt in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": changes.get("prompt", "a")}]}),
    ):
        extra = (
            changes if path == COMPLETIONS else {k: v for k, v in changes.items() if k[0] == "m"}
        )
        response = server.http.post(path, json=prompt | extra)
        check(response, 400, "max_seq_len 2048")
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_null_is_the_default(server: ServerProcess) -> None:
    """Clients send null for what they leave open."""
    names = ("suffix", "stop", "seed", "temperature", "logprobs", "logit_bias", "speculative", "n")
    nulls = dict.fromkeys(names)
    assert server.complete(prompt="a", max_tokens=4, **nulls)["choices"][0]["text"]


def test_a_huge_prompt_keeps_nobody_waiting(server: ServerProcess) -> None:
    """Tokenizing megabytes takes seconds; other requests are answered meanwhile."""
    body = {"prompt": "words of no use " * 60_000, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(httpx.post, f"{server.url}{COMPLETIONS}", json=body, timeout=60)
        answered = 0
        while not huge.done():
            answered += server.http.get("/version").status_code == 200
            answered += server.complete(prompt="a", max_tokens=1) != {}
    check(huge.result(), 400, "max_seq_len 2048")
    assert answered >= 10


# Not what makes an answer long.
KNOWN = sorted(set(CompletionRequest.model_fields) - {"max_tokens", "n", "prompt"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=9), VALUES, max_size=3))
def test_any_json_is_answered(server: ServerProcess, changes: dict[str, Any]) -> None:
    body = {"prompt": "a", "max_tokens": 1} | changes
    response = server.http.post(COMPLETIONS, content=json.dumps(body).encode("ascii"), headers=JSON)
    if response.status_code != 200:
        assert response.status_code in (400, 404, 429), response.text
        assert response.json()["error"]["message"]
