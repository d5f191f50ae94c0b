"""Multimodal checkpoints, seen as the text model inside them.

Their config.json nests the text model's under ``text_config``, and their tensors begin with
``model.language_model.`` where a text model's begin with ``model.``. Both are seen as a
text model's; what else such a checkpoint holds is left out by name (``patterns.left_out``).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.scheme import QuantizationConfig

_PREFIX = "model.language_model."
_NESTED = ("text_config", "vision_config")
_TIED = "tie_word_embeddings"

Info = TypeVar("Info")


def text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """config.json with the text model's fields at its top; a text model's as it is.

    Raises:
        CheckpointError: ``text_config`` is no object, or the two disagree on tied embeddings.
    """
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config must be an object, not {text!r}")
    tied = {part[_TIED] for part in (config, text) if part.get(_TIED) is not None}
    if len(tied) > 1:
        raise CheckpointError(
            f"{where}: {_TIED} is {config[_TIED]!r}, but {text[_TIED]!r} in text_config; correct "
            "one of them"
        )
    outer = {key: value for key, value in config.items() if key not in _NESTED}
    return outer | text | {"architectures": config.get("architectures")}


def tensors(found: Mapping[str, Info]) -> dict[str, Info]:
    """Tensors by the names that a text model's have.

    Raises:
        CheckpointError: two have the same.
    """
    renamed = {_name(name): info for name, info in found.items()}
    if len(renamed) < len(found):
        name = next(n for n in found if n != _name(n) and _name(n) in found)
        raise CheckpointError(f"tensors {name} and {_name(name)} are both there; export again")
    return renamed


def quantization(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """A quantization whose patterns name modules as ``tensors`` does."""
    if config is None:
        return None
    return replace(
        config,
        exclusions=tuple(map(_pattern, config.exclusions)),
        layers=tuple((_pattern(pattern), algorithm) for pattern, algorithm in config.layers),
    )


def _name(name: str) -> str:
    return f"model.{name.removeprefix(_PREFIX)}" if name.startswith(_PREFIX) else name


def _pattern(pattern: str) -> str:
    return pattern.replace("language_model.", "").replace(r"language_model\.", "")
