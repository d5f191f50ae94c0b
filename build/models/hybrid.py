"""What Qwen3-Next and Qwen3.5 share: gated attention in some layers, Gated DeltaNet in the others.

Full attention turns part of each head and multiplies its result by a sigmoid gate, which
is the second half of each query head. Norms are stored around zero, but for the one
behind the recurrence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trtree.build.models.config import ConfigReader
from trtree.build.models.qwen3 import (
    Mlp,
    Qwen3Config,
    append,
    build_decoder,
    decoder_fields,
    rotated_heads,
)
from trtree.build.network.graph import Graph, Rows
from trtree.build.network.network import NetworkError, Tensor
from trtree.build.network.weight_source import KeyHeads

# transformers' defaults (configuration_qwen3_next.py, configuration_qwen3_5.py).
PARTIAL_ROTARY = 0.25
ATTENTION_INTERVAL = 4
_KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True)
class HybridConfig(Qwen3Config):
    """recurrent: per layer, whether it is a Gated DeltaNet instead of attention; the sizes
    after it are those layers'."""

    recurrent: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_offset: ClassVar[float] = 1.0

    @property
    def by_key_heads(self) -> KeyHeads:
        """How ranks divide the channels of q, k and v."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return KeyHeads(self.key_heads, (keys, keys, values))


@dataclass(frozen=True)
class Projections:
    """Of one Gated DeltaNet layer: qkv [rows, channels], queries, keys, values one after
    another; z [rows, value heads, value_dim]; a and b [rows, value heads]."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor


# How a family's checkpoints lay the projections out: graph, normed hidden states.
Project = Callable[[Graph, Tensor], Projections]


def hybrid_fields(config: Mapping[str, Any], *, intermediate: int | None = None) -> dict[str, Any]:
    """The fields of HybridConfig; ``intermediate`` where config.json may lack it."""
    read = ConfigReader(config)
    read.require("attn_output_gate", True)
    read.require("output_gate_type", "swish")  # behind the recurrence
    layers = read.layers()
    fields = decoder_fields(
        config,
        partial_rotary=PARTIAL_ROTARY,
        windows=(None,) * layers,
        intermediate_size=intermediate,
    ) | {
        "recurrent": _recurrent_layers(config, read, layers),
        "key_heads": read.positive("linear_num_key_heads"),
        "value_heads": read.positive("linear_num_value_heads"),
        "key_dim": read.positive("linear_key_head_dim"),
        "value_dim": read.positive("linear_value_head_dim"),
        "conv_kernel": read.positive("linear_conv_kernel_dim"),
    }
    keys, values = fields["key_heads"], fields["value_heads"]
    if values % keys:
        raise NetworkError(
            f"config.json: linear_num_value_heads {values} is no multiple of "
            f"linear_num_key_heads {keys}"
        )
    if fields["conv_kernel"] < 2:
        raise NetworkError(
            f"config.json: linear_conv_kernel_dim {fields['conv_kernel']} is not supported; at "
            "least 2 is"
        )
    return fields


def _recurrent_layers(
    config: Mapping[str, Any], read: ConfigReader, layers: int
) -> tuple[bool, ...]:
    """Without ``layer_types``, every ``full_attention_interval``-th layer attends."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = read.positive("full_attention_interval", ATTENTION_INTERVAL)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise NetworkError(
            f"config.json: layer_types must name {layers} layers, each {' or '.join(_KINDS)}, "
            f"not {kinds!r}"
        )
    return tuple(kind == "linear_attention" for kind in kinds)


def build_hybrid(
    g: Graph, cfg: HybridConfig, captured_layers: Sequence[int], mlp: Mlp, project: Project
) -> None:
    """The target; see qwen3.build."""

    def mixer(g: Graph, h: Tensor, rows: Rows, layer: int) -> Tensor:
        if cfg.recurrent[layer]:
            return delta_net(g, h, cfg, project)
        return gated_attention(g, h, rows, cfg)

    build_decoder(g, cfg, captured_layers, mlp, mixer)


def gated_attention(g: Graph, h: Tensor, rows: Rows, cfg: HybridConfig) -> Tensor:
    """h [rows, hidden] -> [rows, hidden]."""
    heads, kv_heads, head_dim = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    with g.scope("self_attn"):
        sizes = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q_gate, k, v = g.linears(["q_proj", "k_proj", "v_proj"], h, sizes, parallel="column")
        q_gate = g.split_heads("q_gate_heads", q_gate, heads)
        q, gate = g.split("q_gate", q_gate, [head_dim, head_dim])
        q = rotated_heads(g, "q", q, rows.positions, heads, cfg)
        k = rotated_heads(g, "k", k, rows.positions, kv_heads, cfg)
        kv = append(g, k, v, rows.slots, cfg)
        out = g.sigmoid_mul("gated", g.tree_attention(q, rows, kv), gate)
        return g.linear("o_proj", g.merge_heads("merged", out), cfg.hidden_size, parallel="row")


def delta_net(g: Graph, h: Tensor, cfg: HybridConfig, project: Project) -> Tensor:
    """h [rows, hidden] -> [rows, hidden]. Ranks divide the key heads, and with each the value
    heads that use it."""
    keys, values = cfg.key_heads * cfg.key_dim, cfg.value_heads * cfg.value_dim
    with g.scope("linear_attn"):
        projected = project(g, h)
        mixed = g.causal_conv("conv1d", projected.qkv, cfg.conv_kernel, cfg.by_key_heads)
        q, k, v = g.split("qkv", mixed, [keys, keys, values])
        out = g.gated_delta_net(
            "delta",
            g.split_heads("q_heads", q, cfg.key_heads),
            g.split_heads("k_heads", k, cfg.key_heads),
            g.split_heads("v_heads", v, cfg.value_heads),
            projected.a,
            projected.b,
        )
        # Behind the recurrence the norm's weight is stored as it is used.
        out = g.silu_mul("gated", projected.z, g.rms_norm("norm", out, cfg.rms_norm_eps))
        merged = g.merge_heads("merged", out)
        return g.linear("out_proj", merged, cfg.hidden_size, parallel="row")
