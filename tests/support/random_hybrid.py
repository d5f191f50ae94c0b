"""Hybrid targets (Gated DeltaNet beside gated attention): configurations of a few thousand
parameters, and random weights laid out as checkpoints are."""

from typing import Any

import torch

from engines import tiny_config
from random_moe import fused

_RECURRENCE = {
    "full_attention_interval": 2,  # the first layer is recurrent, the second attends
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
_EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 64,
}
_NAMES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}


def hybrid_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json of one of the text models."""
    experts = {} if architecture == "Qwen3_5ForCausalLM" else _EXPERTS
    names = {"architectures": [architecture], "model_type": _NAMES[architecture]}
    config = tiny_config(**(names | _RECURRENCE | experts | changes))
    if architecture == "Qwen3_5MoeForCausalLM":
        del config["intermediate_size"]
    return config


def random_hybrid(config: dict[str, Any], *, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """A state dict for config.json; every vector is off what would hide its absence."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (0.15 * torch.randn(*shape, generator=generator)).to(dtype)

    def vector(size: int, mean: float, spread: float = 0.2) -> torch.Tensor:
        return (mean + spread * torch.randn(size, generator=generator)).to(dtype)

    hidden = config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": vector(hidden, 0.0),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = vector(hidden, 0.0)
        recurrent = (layer + 1) % config["full_attention_interval"] != 0
        part = (_delta_net if recurrent else _attention)(config, matrix, vector)
        part |= _mlp(config, layer, matrix)
        tensors |= {f"{at}{name}": tensor for name, tensor in part.items()}
    return tensors


def _attention(config: dict[str, Any], matrix: Any, vector: Any) -> dict[str, torch.Tensor]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    return {
        "self_attn.q_proj.weight": matrix(2 * q, hidden),
        "self_attn.k_proj.weight": matrix(kv, hidden),
        "self_attn.v_proj.weight": matrix(kv, hidden),
        "self_attn.o_proj.weight": matrix(hidden, q),
        "self_attn.q_norm.weight": vector(head_dim, 0.0),
        "self_attn.k_norm.weight": vector(head_dim, 0.0),
    }


def _delta_net(config: dict[str, Any], matrix: Any, vector: Any) -> dict[str, torch.Tensor]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    sizes = {"qkv": channels, "z": values, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":
        sizes = {"qkvz": channels + values, "ba": 2 * heads}
    part = {f"linear_attn.in_proj_{n}.weight": 4 * matrix(s, hidden) for n, s in sizes.items()}
    return part | {
        "linear_attn.A_log": vector(heads, 0.0, 0.5),
        "linear_attn.dt_bias": vector(heads, 0.0, 0.5),
        "linear_attn.conv1d.weight": 2 * matrix(channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.norm.weight": vector(config["linear_value_head_dim"], 1.0),
        "linear_attn.out_proj.weight": matrix(hidden, values),
    }


def _mlp(config: dict[str, Any], layer: int, matrix: Any) -> dict[str, torch.Tensor]:
    hidden = config["hidden_size"]
    if "num_experts" not in config or layer in config.get("mlp_only_layers", ()):
        return _gated("mlp", config["intermediate_size"], hidden, matrix)
    # Logits far enough apart that float32 and float64 choose alike.
    part = {"mlp.gate.weight": 4 * matrix(config["num_experts"], hidden)}
    part["mlp.shared_expert_gate.weight"] = 4 * matrix(1, hidden)
    size = config["shared_expert_intermediate_size"]
    part |= _gated("mlp.shared_expert", size, hidden, matrix)
    for expert in range(config["num_experts"]):
        size = config["moe_intermediate_size"]
        part |= _gated(f"mlp.experts.{expert}", size, hidden, matrix)
    return part


def _gated(at: str, size: int, hidden: int, matrix: Any) -> dict[str, torch.Tensor]:
    return {
        f"{at}.gate_proj.weight": matrix(size, hidden),
        f"{at}.up_proj.weight": matrix(size, hidden),
        f"{at}.down_proj.weight": matrix(hidden, size),
    }


def transformers_model(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' model of a text model's config.json, with these weights."""
    import transformers

    architecture = config["architectures"][0]
    name = architecture.replace("ForCausalLM", "")
    kind = getattr(transformers, f"{name}Config" if name == "Qwen3Next" else f"{name}TextConfig")
    fields = {k: v for k, v in config.items() if k != "model_type"}
    model = getattr(transformers, architecture)(kind(**fields, attn_implementation="eager"))
    missing, unexpected = model.load_state_dict(fused(tensors), strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert (missing, unexpected) == (tied, [])
    if tied:
        model.tie_weights()
    return model.eval()
