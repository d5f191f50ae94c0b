"""Name patterns as checkpoints write them: exact names, ``*`` for any text, ``re:``."""

import re
from collections.abc import Iterable, Mapping
from typing import Any


def matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for names that match any pattern; use its ``fullmatch``.

    ``prefix*`` covers every name that begins so; ``prefix.*`` covers the module
    ``prefix`` and all below it, as ModelOpt's export means it. ``re:EXPRESSION`` covers
    every name that begins with a match, as compressed-tensors means it.

    Raises:
        re.error: an expression is none.
    """
    alternatives = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            re.compile(pattern[3:])  # what is wrong with it is said of it alone
            alternatives.append(f"(?:{pattern[3:]}).*")
            continue
        stem, children = (pattern[:-2], r"(\..*)?") if pattern.endswith(".*") else (pattern, "")
        alternatives.append(".*".join(re.escape(part) for part in stem.split("*")) + children)
    return re.compile("|".join(alternatives) or r"(?!)")


# By architecture, tensors that are no part of the text model's forward pass: vision, and
# multi-token prediction layers that are no decoder layers by their names.
_LEFT_OUT = {
    "Qwen3NextForCausalLM": ["mtp.*"],
    "Qwen3_5ForCausalLM": ["mtp.*"],
    "Qwen3_5ForConditionalGeneration": ["mtp.*", "model.visual.*"],
    "Qwen3_5MoeForCausalLM": ["mtp.*"],
    "Qwen3_5MoeForConditionalGeneration": ["mtp.*", "model.visual.*"],
}


def left_out(config: Mapping[str, Any]) -> list[str]:
    """Patterns of tensors that are no part of the network, and known not to be: vision, and
    multi-token prediction layers, which draft for another kind of speculation."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    patterns = _LEFT_OUT.get(name, []) if isinstance(name, str) else []
    return [*patterns, *prediction_layers(config)]


def prediction_layers(config: Mapping[str, Any]) -> list[str]:
    """Patterns of the multi-token prediction layers that config.json counts: they follow the
    last decoder layer."""
    layers, extra = (config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    if not isinstance(layers, int) or not isinstance(extra, int):
        return []
    # A number that cannot be leaves its layers' tensors to be named as unknown.
    return [f"model.layers.{layers + i}.*" for i in range(min(extra, 100))]
