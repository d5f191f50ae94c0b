"""A checkpoint's chat template, rendered in a sandbox.

Templates are programs that come with a checkpoint; they run in jinja2's immutable
sandbox, as in transformers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """There is no template, or it refuses the messages; the message says which."""


class ChatTemplate:
    """``chat_template.jinja``, or the entry of ``tokenizer_config.json``."""

    def __init__(self, tokenizer: Path) -> None:
        """tokenizer: the engine's tokenizer directory.

        Raises:
            ChatTemplateError: it holds no template, or one that is not jinja.
        """
        config = _read_config(tokenizer / "tokenizer_config.json")
        file = tokenizer / "chat_template.jinja"
        source = file.read_text() if file.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise ChatTemplateError(
                f"{tokenizer}: the checkpoint came without a chat template; give text instead"
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._special = {
            name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")
        }
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"{tokenizer}: chat template: {error}") from None

    def render(
        self, messages: Sequence[dict[str, str]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Messages ``{"role", "content"}`` -> the prompt that asks for the next answer.

        variables: what else the template reads, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: the template refuses them.
        """
        try:
            return self._template.render(
                {
                    **self._special,
                    **(variables or {}),
                    "messages": list(messages),
                    "add_generation_prompt": True,
                }
            )
        except Exception as error:  # also what Python says to a template's expressions
            raise ChatTemplateError(f"chat template: {error}") from None


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    config = json.loads(file.read_text())
    return config if isinstance(config, dict) else {}


def _text(token: Any) -> str:
    """A special token as tokenizer_config.json has it: a string, an object, or none."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _raise(message: str) -> None:
    raise TemplateError(message)
