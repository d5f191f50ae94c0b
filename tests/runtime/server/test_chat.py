"""Chat completions: the checkpoint's template, and answers as OpenAI's client reads them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from engines import DEMO, build_demo
from server import ServerProcess

TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% if message.role == "tool" %}{{ raise_exception("no tools here") }}{% endif %}
{%- endfor %}{% if shout %}LOUD {{ shout + 1 }}{% endif %}Tell a story:"""
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Which"}, {"type": "text", "text": "?"}]},
]
RENDERED = "system: Be brief.\nuser: Which?\nTell a story:"


def build_with(template: str | None, output: Path) -> Path:
    """The demo engine, its checkpoint with another chat template or none."""
    checkpoint = Path(shutil.copytree(DEMO / "target_nvfp4", output.parent / "checkpoint"))
    file = checkpoint / "chat_template.jinja"
    if template is None:
        file.unlink()
    else:
        file.write_text(template)
    return build_demo(output, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(build_with(TEMPLATE, tmp_path_factory.mktemp("chat") / "chatty"))
    yield process
    process.close()


@pytest.fixture
def client(chat: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{chat.url}/v1", api_key="none", max_retries=0)


def test_the_template_makes_the_prompt(chat: ServerProcess, client: OpenAI) -> None:
    expected = chat.complete(prompt=RENDERED, max_tokens=24)
    answer = client.chat.completions.create(
        model="chatty", messages=MESSAGES, max_completion_tokens=24, n=2
    )
    assert [choice.message.content for choice in answer.choices] == [
        expected["choices"][0]["text"]
    ] * 2
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    # A prompt counts once, however many answers it gets.
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert answer.usage.completion_tokens == 48
    assert answer.usage.model_dump()["speculative"]["accepted_tokens"] > 0


def test_streaming(chat: ServerProcess, client: OpenAI) -> None:
    expected = chat.complete(prompt=RENDERED, max_tokens=24)["choices"][0]["text"]
    parts = list(
        client.chat.completions.create(
            model="chatty",
            messages=MESSAGES,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == expected
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 24


def test_as_long_as_the_engine_can(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chatty",
        messages=MESSAGES,
        extra_body={"ignore_eos": True, "speculative": {"mode": "plain"}},
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_an_engine_without_a_template(tmp_path: Path) -> None:
    process = ServerProcess(build_with(None, tmp_path / "plain"))
    try:
        response = process.http.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert process.complete(prompt="a", max_tokens=1)
    finally:
        process.close()
    assert response.status_code == 400
    error = response.json()["error"]
    assert "came without a chat template" in error["message"]
    assert error["param"] == "messages"


def test_what_the_template_refuses(client: OpenAI) -> None:
    for messages, extra, part in (
        ([{"role": "tool", "content": "x", "name": "y"}], {}, "no tools here"),
        (MESSAGES, {"chat_template_kwargs": {"shout": "x"}}, "chat template"),
        (MESSAGES, {"top_logprobs": 2}, "needs logprobs"),
        ([{"role": "user", "content": "word " * 3000}], {}, "max_seq_len 2048"),
    ):
        with pytest.raises(BadRequestError) as raised:
            client.chat.completions.create(model="chatty", messages=messages, extra_body=extra)  # type: ignore[arg-type]
        assert part in str(raised.value)


def test_a_variable_reaches_the_template(chat: ServerProcess, client: OpenAI) -> None:
    loud = RENDERED.replace("Tell", "LOUD 3Tell")
    expected = chat.complete(prompt=loud, max_tokens=8)["choices"][0]["text"]
    answer = client.chat.completions.create(
        model="chatty",
        messages=MESSAGES,
        max_tokens=8,
        extra_body={"chat_template_kwargs": {"shout": 2, "messages": [], "x": None}},
    )
    assert answer.choices[0].message.content == expected
