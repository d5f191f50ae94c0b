"""Qwen3 dense (``Qwen3ForCausalLM``): GQA with per-head q/k norms, gated MLP.

Other families are this one with another MLP, or without the norms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from trtree.build.models.config import ConfigReader
from trtree.build.network.graph import Graph, Rows
from trtree.build.network.network import State, Tensor
from trtree.build.network.rope import RopeTable, rope_table


@dataclass(frozen=True)
class Qwen3Config:
    """The fields of config.json that shape the network."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    # Of the per-head norms: rms_norm_eps but in widened networks; None: there are none.
    qk_norm_eps: float | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens, or None
    rope: RopeTable
    # Added to norms' weights, which some families store around zero.
    norm_offset: ClassVar[float] = 0.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json.

        Raises:
            NetworkError: a field is missing, of the wrong type, or not supported.
        """
        return cls(**decoder_fields(config))

    @property
    def head_module(self) -> str:
        """The module whose weight turns hidden states into logits."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"


def decoder_fields(
    config: Mapping[str, Any],
    *,
    partial_rotary: float | None = None,
    windows: tuple[int | None, ...] | None = None,
    intermediate_size: int | None = None,
) -> dict[str, Any]:
    """The fields of Qwen3Config.

    partial_rotary: see ``rope_table``. windows: of families whose ``layer_types`` say more.
    intermediate_size: of families that may lack it.
    """
    read = ConfigReader(config)
    read.require("hidden_act", "silu")
    read.flag("attention_bias", False)
    heads = read.positive("num_attention_heads")
    hidden = read.positive("hidden_size")
    head_dim = read.positive("head_dim", hidden // heads)
    return {
        "vocab_size": read.positive("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.positive("intermediate_size", intermediate_size),
        "num_hidden_layers": read.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": read.positive("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.number("rms_norm_eps"),
        "qk_norm_eps": read.number("qk_norm_eps", config.get("rms_norm_eps")),
        "tie_word_embeddings": read.flag("tie_word_embeddings", False),
        "max_position_embeddings": read.positive("max_position_embeddings"),
        "windows": read.attention_windows() if windows is None else windows,
        "rope": rope_table("rope", config, head_dim, partial=partial_rotary),
    }


# A layer's MLP inside its scope: graph, normed hidden states [rows, hidden], layer index.
Mlp = Callable[[Graph, Tensor, int], Tensor]
# Likewise what stands in attention's place, which sees the rows too.
Mixer = Callable[[Graph, Tensor, Rows, int], Tensor]


def build(g: Graph, cfg: Qwen3Config, captured_layers: Sequence[int]) -> None:
    """The target: rows -> argmax and logits of the output rows, captured hidden states."""

    def mlp(g: Graph, h: Tensor, layer: int) -> Tensor:
        return gated_mlp(g, h, cfg.intermediate_size, cfg.hidden_size)

    build_decoder(g, cfg, captured_layers, mlp)


def build_decoder(
    g: Graph,
    cfg: Qwen3Config,
    captured_layers: Sequence[int],
    mlp: Mlp,
    mixer: Mixer | None = None,
) -> None:
    """The target with any MLP, and with attention or what a family has beside it."""
    rows = g.rows()
    mix = mixer or (lambda g, h, rows, i: attention(g, h, rows, cfg, cfg.windows[i]))
    eps, offset = cfg.rms_norm_eps, cfg.norm_offset
    x = g.embedding(
        "model.embed_tokens", rows.token_ids, vocab=cfg.vocab_size, hidden=cfg.hidden_size
    )
    captures = {}
    for i in range(cfg.num_hidden_layers):
        with g.scope(f"model.layers.{i}"):
            h = g.rms_norm("input_layernorm", x, eps, offset=offset)
            x = g.add("attention_residual", x, mix(g, h, rows, i))
            h = g.rms_norm("post_attention_layernorm", x, eps, offset=offset)
            x = g.add("mlp_residual", x, mlp(g, h, i))
        captures[i] = x
    if captured_layers:
        g.output("captured", g.concat("captured", [captures[i] for i in captured_layers]))
    h = g.gather_rows("output_hidden", x, rows.output_rows)
    h = g.rms_norm("model.norm", h, eps, offset=offset)
    logits = g.linear(cfg.head_module, h, cfg.vocab_size, name="lm_head", parallel="column")
    g.output("logits", logits)
    g.output("argmax", g.argmax("argmax", logits))


def attention(
    g: Graph,
    h: Tensor,
    rows: Rows,
    cfg: Qwen3Config,
    window: int | None,
    *,
    fuse_query: bool = True,
) -> Tensor:
    """h [rows, hidden] -> [rows, hidden]; k and v are one product, with q unless told not to."""
    with g.scope("self_attn"):
        q_size = cfg.num_attention_heads * cfg.head_dim
        kv_size = cfg.num_key_value_heads * cfg.head_dim
        if fuse_query:
            modules = ["q_proj", "k_proj", "v_proj"]
            q, k, v = g.linears(modules, h, [q_size, kv_size, kv_size], parallel="column")
        else:
            q = g.linear("q_proj", h, q_size, parallel="column")
            k, v = g.linears(["k_proj", "v_proj"], h, [kv_size, kv_size], parallel="column")
        q = rotated_heads(g, "q", q, rows.positions, cfg.num_attention_heads, cfg)
        k = rotated_heads(g, "k", k, rows.positions, cfg.num_key_value_heads, cfg)
        kv = append(g, k, v, rows.slots, cfg)
        out = g.tree_attention(q, rows, kv, window=window)
        merged = g.merge_heads("merged", out)
        return g.linear("o_proj", merged, cfg.hidden_size, parallel="row")


def rotated_heads(
    g: Graph, which: str, x: Tensor, positions: Tensor, heads: int, cfg: Qwen3Config
) -> Tensor:
    """q or k [rows, heads * head_dim] (or in heads already) -> normed per head (where the
    model does) and rotated [rows, heads, head_dim]."""
    if len(x.shape) == 2:
        x = g.split_heads(f"{which}_heads", x, heads)
    if cfg.qk_norm_eps is not None:
        x = g.rms_norm(f"{which}_norm", x, cfg.qk_norm_eps, offset=cfg.norm_offset)
    return g.rotary_embedding(f"{which}_rotated", x, positions, cfg.rope)


def append(g: Graph, k: Tensor, v: Tensor, slots: Tensor, cfg: Qwen3Config) -> State:
    """Write rotated k [rows, heads, head_dim] and raw v [rows, heads * head_dim] to the cache."""
    kv = g.kv_state(cfg.num_key_value_heads, cfg.head_dim)
    g.kv_append(k, g.split_heads("v_heads", v, cfg.num_key_value_heads), slots, kv)
    return kv


def gated_mlp(g: Graph, h: Tensor, intermediate: int, hidden: int, *, scope: str = "mlp") -> Tensor:
    """down(silu(gate(h)) * up(h)), h [rows, hidden]."""
    with g.scope(scope):
        sizes = [intermediate, intermediate]
        gate, up = g.linears(["gate_proj", "up_proj"], h, sizes, parallel="column")
        return g.linear("down_proj", g.silu_mul("activated", gate, up), hidden, parallel="row")
