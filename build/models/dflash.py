"""The DFlash block-diffusion drafter (``DFlashDraftModel``).

Two networks over one KV cache that holds context only: "drafter_context" turns
captured target states of newly committed rows into keys and values, and
"drafter_block" denoises ``[bonus, mask, ...]`` after the committed prefix. The
block's own keys and values go to the slots after the prefix and are overwritten
when the context grows, so nothing has to drop them.
"""

from dataclasses import dataclass, replace

from trtree.build.models import qwen3
from trtree.build.network.graph import Graph


@dataclass(frozen=True)
class DFlashConfig:
    """layers: the drafter's transformer, which is Qwen3's; captures: target layers it
    sees; causal: per layer, whether a block slot sees only the slots before it; draft_vocab:
    tokens that its own head knows, None where the head is the target's."""

    layers: qwen3.Qwen3Config
    captures: int
    causal: tuple[bool, ...]
    draft_vocab: int | None = None


def build_context(g: Graph, cfg: DFlashConfig) -> None:
    """captured [rows, captures * hidden] -> keys and values of every layer, appended."""
    layers = cfg.layers
    captured = g.input("captured", ("rows", cfg.captures * layers.hidden_size), g.network.dtype)
    positions = g.input("positions", ("rows",), "int32")
    slots = g.input("slots", ("rows",), "int32")
    context = g.linear("fc", captured, layers.hidden_size)
    context = g.rms_norm("hidden_norm", context, layers.rms_norm_eps)
    # One product for the keys and values of all layers: they share their input.
    modules = [
        f"layers.{i}.self_attn.{which}_proj"
        for i in range(layers.num_hidden_layers)
        for which in "kv"
    ]
    kv_size = layers.num_key_value_heads * layers.head_dim
    parts = g.linears(modules, context, [kv_size] * len(modules), parallel="column")
    for i in range(layers.num_hidden_layers):
        with g.scope(f"layers.{i}.self_attn"):
            k = qwen3.rotated_heads(
                g, "k", parts[2 * i], positions, layers.num_key_value_heads, layers
            )
            qwen3.append(g, k, parts[2 * i + 1], slots, layers)


def build_block(g: Graph, cfg: DFlashConfig, target: qwen3.Qwen3Config, top_k: int) -> None:
    """Rows of whole blocks -> top-k log-probs and ids of the output rows.

    Attention is bidirectional inside the block (packed_mask is all ones) but for layers
    that are causal there, which have a mask of their own. Embedding and head are the
    target's, but for a head of fewer tokens, whose ids ``d2t`` maps to the target's.
    """
    layers = cfg.layers
    rows = g.rows()
    causal_rows = rows
    if any(cfg.causal):
        causal_mask = g.input("causal_mask", ("rows", "mask_words"), "int32")
        causal_rows = replace(rows, packed_mask=causal_mask)
    x = g.embedding(
        "model.embed_tokens",
        rows.token_ids,
        vocab=target.vocab_size,
        hidden=layers.hidden_size,
        owner="target",
    )
    for i in range(layers.num_hidden_layers):
        with g.scope(f"layers.{i}"):
            h = g.rms_norm("input_layernorm", x, layers.rms_norm_eps)
            seen = causal_rows if cfg.causal[i] else rows
            # Keys and values are rows of the context pass's weight, stored once.
            h = qwen3.attention(g, h, seen, layers, layers.windows[i], fuse_query=False)
            x = g.add("attention_residual", x, h)
            h = g.rms_norm("post_attention_layernorm", x, layers.rms_norm_eps)
            h = qwen3.gated_mlp(g, h, layers.intermediate_size, layers.hidden_size)
            x = g.add("mlp_residual", x, h)
    h = g.gather_rows("output_hidden", x, rows.output_rows)
    h = g.rms_norm("norm", h, layers.rms_norm_eps)
    if cfg.draft_vocab:
        logits = g.linear("lm_head", h, cfg.draft_vocab, parallel="column")
        log_probs, ids = g.top_k_log_probs("top_k", logits, top_k, id_offsets="d2t")
    else:
        logits = g.linear(
            target.head_module,
            h,
            target.vocab_size,
            name="lm_head",
            owner="target",
            parallel="column",
        )
        log_probs, ids = g.top_k_log_probs("top_k", logits, top_k)
    g.output("log_probs", log_probs)
    g.output("token_ids", ids)
