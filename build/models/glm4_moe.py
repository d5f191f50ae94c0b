"""GLM-4.5 to 4.7 (``Glm4MoeForCausalLM``): partial rotary embedding, optional q/k norms, and
experts behind a sigmoid router with group-limited choice, plus a shared expert.

The multi-token prediction layer that follows the last decoder layer in a checkpoint is left
out (``checkpoint.patterns.left_out``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trtree.build.models.config import ConfigReader
from trtree.build.models.moe import read_routing, sparse_mlp
from trtree.build.models.qwen3 import Mlp, Qwen3Config, build_decoder, decoder_fields, gated_mlp
from trtree.build.network.graph import Graph
from trtree.build.network.network import Tensor
from trtree.plugins.moe.contract import Routing

# transformers' default (configuration_glm4_moe.py).
PARTIAL_ROTARY = 0.5


@dataclass(frozen=True)
class Glm4MoeConfig(Qwen3Config):
    """dense_layers: the first layers, whose MLP is one of its own, without experts."""

    routing: Routing
    moe_intermediate_size: int
    shared_experts: int
    dense_layers: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json; defaults are transformers'.

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        read = ConfigReader(config)
        read.require("scoring_func", "sigmoid")
        read.require("topk_method", "noaux_tc")
        read.count("num_nextn_predict_layers", 0)
        fields = decoder_fields(config, partial_rotary=PARTIAL_ROTARY)
        if not read.flag("use_qk_norm", False):
            fields["qk_norm_eps"] = None
        return cls(
            **fields,
            **expert_fields(read, routed_scale=1.0),
            dense_layers=read.count("first_k_dense_replace", 1),
        )


def expert_fields(read: ConfigReader, *, routed_scale: float) -> dict[str, Any]:
    """What config.json says of routing and experts; ``routed_scale`` is the family's default.

    Raises:
        NetworkError: names the key.
    """
    return {
        "routing": read_routing(
            experts=read.positive(read.present("n_routed_experts", "num_local_experts")),
            top_k=read.positive("num_experts_per_tok"),
            scores="sigmoid",
            normalize=read.flag("norm_topk_prob", True),
            scale=read.number("routed_scaling_factor", routed_scale),
            groups=read.positive("n_group", 1),
            top_groups=read.positive("topk_group", 1),
        ),
        "moe_intermediate_size": read.positive("moe_intermediate_size"),
        "shared_experts": read.positive("n_shared_experts", 1),
    }


def build(g: Graph, cfg: Glm4MoeConfig, captured_layers: Sequence[int]) -> None:
    """The target; see qwen3.build."""
    build_decoder(g, cfg, captured_layers, mlp_of(cfg))


def mlp_of(cfg: Glm4MoeConfig) -> Mlp:
    """A layer's MLP: one of its own in the first layers, experts in the others."""

    def mlp(g: Graph, h: Tensor, layer: int) -> Tensor:
        if layer < cfg.dense_layers:
            return gated_mlp(g, h, cfg.intermediate_size, cfg.hidden_size)
        return sparse_mlp(
            g,
            h,
            cfg.routing,
            cfg.moe_intermediate_size,
            cfg.hidden_size,
            correction_bias=True,
            shared_intermediate=cfg.shared_experts * cfg.moe_intermediate_size,
        )

    return mlp
