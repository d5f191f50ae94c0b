"""Layers by kind and what a request keeps in each, read from any family's config.json.

Works for architectures that cannot be built; names of fields are transformers'.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtree.build.models.config import MAX_LAYERS
from trtree.build.models.glm_moe_dsa import own_indexers
from trtree.build.network.network import NetworkError

LINEAR = "linear_attention"
_STATE_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim"),
)
# Fields that count something; of another type they say nothing.
_COUNTS = frozenset(
    {"num_experts", "n_routed_experts", "first_k_dense_replace", "decoder_sparse_step"}
    | {"kv_lora_rank", "qk_rope_head_dim", "num_attention_heads", "num_key_value_heads"}
    | {"head_dim", "hidden_size", "index_topk", "index_head_dim", "full_attention_interval"}
    | set(_STATE_SIZES)
)


@dataclass(frozen=True)
class Layers:
    """kinds, mlps: how many of each; kv_elements: cached per token, all layers together;
    indexing: layers that choose which keys are attended, and keep a key of their own for it;
    states: (name, shape, layers) of what is kept per request whatever its length."""

    kinds: dict[str, int]
    mlps: dict[str, int]
    kv_elements: int
    indexing: int
    states: list[tuple[str, tuple[int, ...], int]]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Layers | None":
        """None if config.json does not say how many layers there are, or no number that can be."""
        nested = config.get("transformer_layer_config") or config.get("text_config") or config
        said = nested if isinstance(nested, dict) else config
        text = {key: value for key, value in said.items() if key not in _COUNTS or _counts(value)}
        count = text.get("num_hidden_layers")
        if type(count) is not int or count > MAX_LAYERS:
            return None
        kinds = _kinds(text, count)
        counted = Counter(kinds)
        attending = sum(n for kind, n in counted.items() if kind != LINEAR)
        indexing = _indexing(text, count)
        keys = indexing * (text.get("index_head_dim") or 0)
        return cls(
            kinds=dict(counted),
            mlps=dict(Counter(_mlps(text, count))),
            kv_elements=attending * _kv_elements(text) + keys,
            indexing=indexing,
            states=_states(text, counted[LINEAR]) if counted[LINEAR] else [],
        )


def _counts(value: Any) -> bool:
    return type(value) is int and value > 0


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        return [str(kind) for kind in kinds]
    if text.get("linear_num_value_heads"):
        every = text.get("full_attention_interval", 4)
        return ["full_attention" if (i + 1) % every == 0 else LINEAR for i in range(count)]
    if text.get("kv_lora_rank"):
        return [
            "deepseek_sparse_attention" if text.get("index_topk") else "latent_attention"
        ] * count
    return ["full_attention"] * count


def _mlps(text: Mapping[str, Any], count: int) -> list[str]:
    """Dense, or so many experts of which so many are used."""
    experts = text.get("num_experts") or text.get("n_routed_experts")
    if not experts:
        return ["dense"] * count
    sparse = f"of {experts} experts ({text.get('num_experts_per_tok')} used)"
    listed = text.get("mlp_layer_types")
    if isinstance(listed, list) and len(listed) == count:
        return [sparse if kind == "sparse" else "dense" for kind in listed]
    first, step = text.get("first_k_dense_replace") or 0, text.get("decoder_sparse_step") or 1
    listed = text.get("mlp_only_layers")
    dense = listed if isinstance(listed, list) else []
    return [
        sparse if i >= first and i not in dense and (i + 1) % step == 0 else "dense"
        for i in range(count)
    ]


def _kv_elements(text: Mapping[str, Any]) -> int:
    """Per token and attending layer: keys and values, or a latent and one rotated key."""
    latent = text.get("kv_lora_rank")
    if latent:
        return int(latent + text.get("qk_rope_head_dim", 0))
    heads = text.get("num_attention_heads")
    if heads is None:
        return 0
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // heads
    return int(2 * (text.get("num_key_value_heads") or heads) * head_dim)


def _indexing(text: Mapping[str, Any], count: int) -> int:
    if not text.get("index_topk"):
        return 0
    try:
        return sum(own_indexers(text, count))
    except NetworkError:  # of a family that has other fields
        return count


def _states(text: Mapping[str, Any], layers: int) -> list[tuple[str, tuple[int, ...], int]]:
    """Gated DeltaNet: a matrix per value head, and the window of the causal convolution."""
    if not all(key in text for key in _STATE_SIZES):
        return []
    keys, values, key_dim, value_dim, kernel = (text[key] for key in _STATE_SIZES)
    channels = 2 * keys * key_dim + values * value_dim
    return [
        ("recurrent state", (values, key_dim, value_dim), layers),
        ("convolution window", (channels, kernel - 1), layers),
    ]
