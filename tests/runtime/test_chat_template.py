"""Chat templates: where they come from, what they see, and what they may not do."""

import json
from pathlib import Path
from typing import Any

import pytest

from trtree.runtime.chat_template import ChatTemplate, ChatTemplateError

QUESTION = [{"role": "user", "content": "Why?"}]
TEMPLATE = (
    "{% for m in messages %}\n<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(directory: Path, config: dict[str, Any], file: str | None = None) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (directory / "chat_template.jinja").write_text(file)
    return directory


def test_the_file_comes_before_the_configuration(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>"}, "chat_template": "old"}
    template = ChatTemplate(tokenizer(tmp_path, config, TEMPLATE))
    assert template.render(QUESTION) == "<user>Why?</s>\n<assistant>"


def test_the_configuration_alone(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "chat_template": TEMPLATE}
    assert ChatTemplate(tokenizer(tmp_path, config)).render(QUESTION).endswith("<assistant>")


def test_the_same_text_as_transformers(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content | trim }}\n"
        "    {{- '<|im_end|>\\n' + ({'a': 'é'} | tojson) }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    )
    theirs, _ = render_jinja_template(
        conversations=[QUESTION], chat_template=source, add_generation_prompt=True
    )
    assert ChatTemplate(tokenizer(tmp_path, {}, source)).render(QUESTION) == theirs[0]


@pytest.mark.parametrize(
    ("config", "file", "message"),
    [
        ({}, None, "without a chat template"),
        ({}, "{% if %}", "chat template: "),
        ({}, "{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ({}, "{{ ''.__class__.__mro__ }}", "unsafe"),
        ({}, "{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_refusals(tmp_path: Path, config: dict[str, Any], file: str | None, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(tokenizer(tmp_path, config, file)).render(QUESTION)
