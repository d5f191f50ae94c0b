"""Qwen3-Next (``Qwen3NextForCausalLM``): a hybrid whose MLPs are experts behind a softmax
router, beside a gated shared expert."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trtree.build.models.config import ConfigReader
from trtree.build.models.hybrid import HybridConfig, Projections, build_hybrid, hybrid_fields
from trtree.build.models.moe import read_routing, sparse_mlp
from trtree.build.models.qwen3 import gated_mlp
from trtree.build.network.graph import Graph
from trtree.build.network.network import Tensor
from trtree.build.network.weight_source import KeyHeads
from trtree.plugins.moe.contract import Routing


@dataclass(frozen=True)
class Qwen3NextConfig(HybridConfig):
    """sparse: per layer, whether its MLP is one of experts."""

    routing: Routing
    moe_intermediate_size: int
    shared_intermediate_size: int
    sparse: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json; defaults are transformers' (configuration_qwen3_next.py).

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        read = ConfigReader(config)
        fields = hybrid_fields(config)
        layers = range(fields["num_hidden_layers"])
        step, dense = read.positive("decoder_sparse_step", 1), read.counts("mlp_only_layers")
        return cls(
            **fields,
            **expert_fields(read, normalize=read.flag("norm_topk_prob", True)),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        )


def expert_fields(read: ConfigReader, *, normalize: bool) -> dict[str, Any]:
    """routing, moe_intermediate_size and shared_intermediate_size."""
    return {
        "routing": read_routing(
            experts=read.positive(read.present("num_experts", "num_local_experts")),
            top_k=read.positive("num_experts_per_tok"),
            scores="softmax",
            normalize=normalize,
        ),
        "moe_intermediate_size": read.positive("moe_intermediate_size"),
        "shared_intermediate_size": read.positive("shared_expert_intermediate_size"),
    }


def build(g: Graph, cfg: Qwen3NextConfig, captured_layers: Sequence[int]) -> None:
    """The target; see qwen3.build."""

    def mlp(g: Graph, h: Tensor, layer: int) -> Tensor:
        if not cfg.sparse[layer]:
            return gated_mlp(g, h, cfg.intermediate_size, cfg.hidden_size)
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
    """Two linears, laid out key head by key head: its q, its k, and the v and z (or b and a)
    of the value heads that use it."""
    heads, group = cfg.key_heads, cfg.value_heads // cfg.key_heads
    part = group * cfg.value_dim
    sizes = [cfg.key_dim, cfg.key_dim, part, part]
    qkvz = g.linear("in_proj_qkvz", h, heads * sum(sizes), key_heads=KeyHeads(heads))
    q, k, v, z = g.split("qkvz", g.split_heads("qkvz_heads", qkvz, heads), sizes)
    ba = g.linear("in_proj_ba", h, 2 * cfg.value_heads, key_heads=KeyHeads(heads))
    b, a = g.split("ba", g.split_heads("ba_heads", ba, heads), [group, group])
    parts = [g.merge_heads(f"{name}_flat", x) for name, x in (("q", q), ("k", k), ("v", v))]
    return Projections(
        qkv=g.concat("mixed_qkv", parts),
        z=g.regroup("z_heads", z, cfg.value_heads),
        a=g.merge_heads("a_flat", a),
        b=g.merge_heads("b_flat", b),
    )
