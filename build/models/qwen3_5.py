"""Qwen3.5 and Qwen3.6, dense and with experts: Qwen3-Next's layers with a linear for each part
of the recurrence's input.

Multimodal checkpoints (``...ForConditionalGeneration``) are read for their text part: at
text positions alone, their multimodal RoPE is the plain one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trtree.build.models.config import ConfigReader
from trtree.build.models.hybrid import HybridConfig, Projections, build_hybrid, hybrid_fields
from trtree.build.models.moe import sparse_mlp
from trtree.build.models.qwen3 import gated_mlp
from trtree.build.models.qwen3_next import expert_fields
from trtree.build.network.graph import Graph
from trtree.build.network.network import Tensor
from trtree.build.network.weight_source import KeyHeads
from trtree.plugins.moe.contract import Routing


@dataclass(frozen=True)
class Qwen35Config(HybridConfig):
    """The dense models."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read the text part of config.json.

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        return cls(**hybrid_fields(config))


@dataclass(frozen=True)
class Qwen35MoeConfig(HybridConfig):
    """Every layer's MLP is one of experts."""

    routing: Routing
    moe_intermediate_size: int
    shared_intermediate_size: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read the text part of config.json.

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        experts = expert_fields(ConfigReader(config), normalize=True)
        fields = hybrid_fields(config, intermediate=experts["moe_intermediate_size"])
        return cls(**fields, **experts)


def build(g: Graph, cfg: Qwen35Config, captured_layers: Sequence[int]) -> None:
    """The dense target; see qwen3.build."""

    def mlp(g: Graph, h: Tensor, layer: int) -> Tensor:
        return gated_mlp(g, h, cfg.intermediate_size, cfg.hidden_size)

    build_hybrid(g, cfg, captured_layers, mlp, lambda g, h: _project(g, h, cfg))


def build_moe(g: Graph, cfg: Qwen35MoeConfig, captured_layers: Sequence[int]) -> None:
    """The target with experts; see qwen3.build."""

    def mlp(g: Graph, h: Tensor, layer: int) -> Tensor:
        return sparse_mlp(
            g,
            h,
            cfg.routing,
            cfg.moe_intermediate_size,
            cfg.hidden_size,
            shared_intermediate=cfg.shared_intermediate_size,
            gated_shared=True,
        )

    build_hybrid(g, cfg, captured_layers, mlp, lambda g, h: _project(g, h, cfg))


def _project(g: Graph, h: Tensor, cfg: HybridConfig) -> Projections:
    keys, values = cfg.key_heads * cfg.key_dim, cfg.value_heads * cfg.value_dim
    heads = KeyHeads(cfg.key_heads)
    z = g.linear("in_proj_z", h, values, key_heads=heads)
    return Projections(
        qkv=g.linear("in_proj_qkv", h, 2 * keys + values, key_heads=cfg.by_key_heads),
        z=g.split_heads("z_heads", z, cfg.value_heads),
        a=g.linear("in_proj_a", h, cfg.value_heads, key_heads=heads),
        b=g.linear("in_proj_b", h, cfg.value_heads, key_heads=heads),
    )
