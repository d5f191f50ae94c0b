"""Model families by the ``architectures`` entry of a checkpoint's config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtree.build.models import qwen3
from trtree.build.network.graph import Graph
from trtree.build.network.network import NetworkError


@dataclass(frozen=True)
class Family:
    """How to read a family's config.json and describe its network."""

    parse: Callable[[Mapping[str, Any]], qwen3.Qwen3Config]
    build: Callable[[Graph, qwen3.Qwen3Config, Sequence[int]], None]


FAMILIES: dict[str, Family] = {
    "Qwen3ForCausalLM": Family(qwen3.Qwen3Config.from_dict, qwen3.build),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a target checkpoint.

    Raises:
        NetworkError: the architecture is missing or not supported; the message lists
            those that are.
    """
    architectures = config.get("architectures")
    if architectures is not None and not isinstance(architectures, list):
        raise NetworkError(
            f"config.json: architectures must be a list of names, not {architectures!r}"
        )
    name = architectures[0] if architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise NetworkError(
            f"config.json: architecture {name!r} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]
