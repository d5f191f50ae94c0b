"""Qwen3 targets with random weights, without transformers."""

from typing import Any

import torch


def random_target(config: dict[str, Any], *, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """A state dict for config.json; norms off 1 so that a missing one shows."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (0.15 * torch.randn(*shape, generator=generator)).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    tensors["model.norm.weight"] = norm(hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for module, out, size in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ):
            tensors[f"{at}{module}.weight"] = matrix(out, size)
            if config["attention_bias"] and module.startswith("self_attn."):
                tensors[f"{at}{module}.bias"] = matrix(out)
        for module, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", config["head_dim"]),
            ("self_attn.k_norm", config["head_dim"]),
        ):
            tensors[f"{at}{module}.weight"] = norm(size)
    return tensors
