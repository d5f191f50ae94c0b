"""GLM-5, 5.1 and 5.2 (``GlmMoeDsaForCausalLM``): latent attention over the keys that an
indexer chooses, and the experts of GLM-4.5.

Attention is in absorbed form: ``kv_b_proj``'s key part goes into the queries and its value part
behind the attention, so that a token keeps its latent and one rotated key. Layers whose indexer
is "shared" have none: they attend the selection of the last "full" one. The multi-token
prediction layer is left out (``checkpoint.patterns.left_out``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from trtree.build.models.config import ConfigReader
from trtree.build.models.glm4_moe import Glm4MoeConfig, expert_fields, mlp_of
from trtree.build.models.qwen3 import build_decoder, decoder_fields
from trtree.build.network.graph import Graph, Rows
from trtree.build.network.network import NetworkError, Tensor
from trtree.build.network.rope import rope_parameters

# Of the norms inside attention, whatever rms_norm_eps says (modeling_glm_moe_dsa.py).
_INNER_EPS = 1e-6
_INDEXERS = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}


@dataclass(frozen=True)
class GlmMoeDsaConfig(Glm4MoeConfig):
    """A head's query is ``nope_dim`` numbers and ``rope_dim`` rotated ones; its value has
    ``value_dim``. ``own_indexer``: per layer, whether it chooses keys itself."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    index_heads: int
    index_dim: int
    index_top_k: int
    own_indexer: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json; defaults are transformers'.

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        read = ConfigReader(config)
        layers, rope_dim = read.layers(), read.positive("qk_rope_head_dim")
        for key in ("rope_interleave", "indexer_rope_interleave"):
            read.require(key, True)
        read.require("mlp_bias", False)
        read.require("moe_layer_freq", 1)
        read.require("scoring_func", "sigmoid")
        read.require("topk_method", "noaux_tc")
        read.count("num_nextn_predict_layers", 0)
        # What turns is one part of a head; transformers overrides head_dim so too.
        fields = decoder_fields({**config, "head_dim": rope_dim}, windows=(None,) * layers)
        nope_dim = read.positive("qk_nope_head_dim")
        return cls(
            **fields | {"rope": replace(fields["rope"], interleaved=True), "qk_norm_eps": None},
            **expert_fields(read, routed_scale=2.5),
            dense_layers=_dense_layers(config, read, layers),
            q_rank=read.positive("q_lora_rank"),
            kv_rank=read.positive("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=read.positive("v_head_dim"),
            scale=_attention_scale(config, read, nope_dim + rope_dim),
            index_heads=read.positive("index_n_heads", 32),
            index_dim=_index_dim(read, rope_dim),
            index_top_k=read.positive("index_topk", 2048),
            own_indexer=own_indexers(config, layers),
        )


def build(g: Graph, cfg: GlmMoeDsaConfig, captured_layers: Sequence[int]) -> None:
    """The target; see qwen3.build."""
    selections: list[Tensor] = []  # of the layers so far that choose

    def mixer(g: Graph, h: Tensor, rows: Rows, layer: int) -> Tensor:
        modules, sizes = (
            ["q_a_proj", "kv_a_proj_with_mqa"],
            [cfg.q_rank, cfg.kv_rank + cfg.rope_dim],
        )
        if cfg.own_indexer[layer]:
            modules, sizes = [*modules, "indexer.wk"], [*sizes, cfg.index_dim]
        with g.scope("self_attn"):
            q, kv, *key = g.linears(modules, h, sizes)
            q = g.rms_norm("q_a_layernorm", q, _INNER_EPS)
            if cfg.own_indexer[layer]:
                selections.append(choose_keys(g, h, q, key[0], rows, cfg))
            return attention(g, q, kv, rows, cfg, selections[-1])

    build_decoder(g, cfg, captured_layers, mlp_of(cfg), mixer)


def choose_keys(
    g: Graph, h: Tensor, q: Tensor, k: Tensor, rows: Rows, cfg: GlmMoeDsaConfig
) -> Tensor:
    """h [rows, hidden], low-rank queries [rows, q_rank] and the indexer's keys [rows, index_dim],
    neither normed nor rotated -> int32 [rows, index_top_k].

    Every rank has the indexer whole: its work is small, and all need all of its choice.
    """
    with g.scope("indexer"):
        heads, dim = cfg.index_heads, cfg.index_dim
        q = g.split_heads("q_heads", g.linear("wq_b", q, heads * dim), heads)
        q = g.rotary_embedding("q_rotated", q, rows.positions, cfg.rope)
        k = g.layer_norm("k_norm", k, _INNER_EPS)
        k = g.rotary_embedding("k_rotated", g.split_heads("k_head", k, 1), rows.positions, cfg.rope)
        keys = g.latent_state("keys", dim)
        g.latent_append("append", g.merge_heads("key", k), rows.slots, keys)
        weights = g.linear("weights_proj", h, heads, dtype="float32")
        return g.index_select("select", q, weights, rows, keys, cfg.index_top_k)


def attention(
    g: Graph, q: Tensor, kv: Tensor, rows: Rows, cfg: GlmMoeDsaConfig, selection: Tensor
) -> Tensor:
    """Low-rank queries [rows, q_rank] and latents [rows, kv_rank + rope_dim], not yet normed or
    rotated -> [rows, hidden]."""
    heads, nope, rope = cfg.num_attention_heads, cfg.nope_dim, cfg.rope_dim
    latent, key = g.split("kv", kv, [cfg.kv_rank, rope])
    latent = g.rms_norm("kv_a_layernorm", latent, _INNER_EPS)
    key = g.rotary_embedding("k_rotated", g.split_heads("k_head", key, 1), rows.positions, cfg.rope)
    cache = g.latent_state("latent", cfg.kv_rank + rope)
    cached = g.concat("cached", [latent, g.merge_heads("key", key)])
    g.latent_append("append", cached, rows.slots, cache)

    q = g.linear("q_b_proj", q, heads * (nope + rope), parallel="column")
    plain, turned = g.split("q", g.split_heads("q_heads", q, heads), [nope, rope])
    turned = g.rotary_embedding("q_rotated", turned, rows.positions, cfg.rope)
    sizes = {"key_dim": nope, "value_dim": cfg.value_dim, "latent": cfg.kv_rank}
    absorbed = g.head_linear("kv_b_proj", plain, "key", **sizes)
    q = g.concat("absorbed", [absorbed, turned])
    out = g.latent_attention(
        "attention", q, rows, cache, selection, value_dim=cfg.kv_rank, scale=cfg.scale
    )
    out = g.merge_heads("merged", g.head_linear("kv_b_proj", out, "value", **sizes))
    return g.linear("o_proj", out, cfg.hidden_size, parallel="row")


def _attention_scale(config: Mapping[str, Any], read: ConfigReader, head_dim: int) -> float:
    """head_dim ** -0.5, times the square of YaRN's magnitude where config.json asks for it."""
    rope = rope_parameters(config)
    scale = float(head_dim**-0.5)
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not weight:
        return scale
    of_rope = ConfigReader(rope, "config.json: rope_parameters")
    factor, weight = of_rope.number("factor"), of_rope.number("mscale_all_dim")
    magnitude = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * magnitude * magnitude


def _index_dim(read: ConfigReader, rope_dim: int) -> int:
    dim = read.positive("index_head_dim", 128)
    if dim < rope_dim:
        raise NetworkError(
            f"config.json: index_head_dim {dim} is smaller than qk_rope_head_dim {rope_dim}, "
            "which turns in the indexer too"
        )
    return dim


def _dense_layers(config: Mapping[str, Any], read: ConfigReader, layers: int) -> int:
    """The first layers without experts: ``mlp_layer_types``, or a number of them."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return min(read.count("first_k_dense_replace", 3), layers)
    first = kinds.count("dense") if isinstance(kinds, list) else -1
    if kinds != ["dense"] * first + ["sparse"] * (layers - first):
        raise NetworkError(
            f"config.json: mlp_layer_types must name {layers} layers, dense ones before sparse "
            f"ones, not {kinds!r}"
        )
    return first


def own_indexers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Per layer, whether it chooses keys itself instead of sharing the last choice.

    ``indexer_types``, else ``index_topk_pattern``, else every ``index_topk_freq``-th layer
    behind ``index_skip_topk_offset`` (transformers' configuration_glm_moe_dsa.py).

    Raises:
        NetworkError: they do not name every layer, or not the first as one that chooses.
    """
    read = ConfigReader(config)
    name = read.present("indexer_types", "index_topk_pattern")
    kinds = config.get(name)
    if kinds is None:
        every = max(read.count("index_topk_freq", 1), 1)
        offset = read.count("index_skip_topk_offset", 2)
        own = tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    elif isinstance(kinds, list | str) and all(str(kind) in _INDEXERS for kind in kinds):
        own = tuple(_INDEXERS[str(kind)] == "full" for kind in kinds)
    else:
        own = ()
    if len(own) != layers or not own[0]:
        raise NetworkError(
            f"config.json: {name} must name {layers} layers, each full or shared, the first "
            f"full, not {kinds!r}"
        )
    return own
