"""Model families by the ``architectures`` entry of a checkpoint's config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtree.build.checkpoint import dflash_config
from trtree.build.models import glm4_moe, glm_moe_dsa, qwen3, qwen3_5, qwen3_moe, qwen3_next
from trtree.build.network.graph import Graph
from trtree.build.network.network import NetworkError

_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Family:
    """How to read a family's config.json and describe its network.

    biased: modules that have biases where config.json has ``attention_bias``.
    """

    parse: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Graph, Any, Sequence[int]], None]
    biased: tuple[str, ...] = _QKVO


_LOW_RANK = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
_QWEN3_5 = Family(qwen3_5.Qwen35Config.from_dict, qwen3_5.build)
_QWEN3_5_MOE = Family(qwen3_5.Qwen35MoeConfig.from_dict, qwen3_5.build_moe)

FAMILIES: dict[str, Family] = {
    "Glm4MoeForCausalLM": Family(glm4_moe.Glm4MoeConfig.from_dict, glm4_moe.build, _QKVO[:3]),
    "GlmMoeDsaForCausalLM": Family(
        glm_moe_dsa.GlmMoeDsaConfig.from_dict, glm_moe_dsa.build, _LOW_RANK
    ),
    "Qwen3ForCausalLM": Family(qwen3.Qwen3Config.from_dict, qwen3.build),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.Qwen3MoeConfig.from_dict, qwen3_moe.build),
    "Qwen3NextForCausalLM": Family(qwen3_next.Qwen3NextConfig.from_dict, qwen3_next.build),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
}


def family_of(config: Mapping[str, Any], file: Path = Path("config.json")) -> Family:
    """The family of a target checkpoint, whose config.json ``file`` is.

    Raises:
        NetworkError: the architecture is missing or not supported; the message names the
            file and lists those that are.
    """
    architectures = config.get("architectures")
    if architectures is not None and not isinstance(architectures, list):
        raise NetworkError(f"{file}: architectures must be a list of names, not {architectures!r}")
    name = architectures[0] if architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        if name in dflash_config.ARCHITECTURES:
            raise NetworkError(
                f"{file}: architecture {name!r} is a drafter's; give it as --drafter, and its "
                "target as --checkpoint"
            )
        raise NetworkError(
            f"{file}: architecture {name!r} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]
