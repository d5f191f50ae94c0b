"""Qwen3-MoE (``Qwen3MoeForCausalLM``): Qwen3 whose MLPs are experts behind a softmax router."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trtree.build.models.config import ConfigReader
from trtree.build.models.moe import read_routing, sparse_mlp
from trtree.build.models.qwen3 import Qwen3Config, build_decoder, decoder_fields, gated_mlp
from trtree.build.network.graph import Graph
from trtree.build.network.network import Tensor
from trtree.plugins.moe.contract import Routing


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """sparse: per layer, whether its MLP is one of experts."""

    routing: Routing
    moe_intermediate_size: int
    sparse: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json; defaults are transformers' (configuration_qwen3_moe.py).

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        read = ConfigReader(config)
        fields = decoder_fields(config)
        layers = range(fields["num_hidden_layers"])
        # Unlike in the dense family, a window is every layer's.
        fields["windows"] = (read.one_window(),) * len(layers)
        step, dense = read.positive("decoder_sparse_step", 1), read.counts("mlp_only_layers")
        return cls(
            **fields,
            routing=read_routing(
                experts=read.positive(read.present("num_experts", "num_local_experts")),
                top_k=read.positive("num_experts_per_tok"),
                scores="softmax",
                normalize=read.flag("norm_topk_prob", False),
            ),
            moe_intermediate_size=read.positive("moe_intermediate_size"),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        )


def build(g: Graph, cfg: Qwen3MoeConfig, captured_layers: Sequence[int]) -> None:
    """The target; see qwen3.build."""

    def mlp(g: Graph, h: Tensor, layer: int) -> Tensor:
        if cfg.sparse[layer]:
            return sparse_mlp(g, h, cfg.routing, cfg.moe_intermediate_size, cfg.hidden_size)
        return gated_mlp(g, h, cfg.intermediate_size, cfg.hidden_size)

    build_decoder(g, cfg, captured_layers, mlp)
