"""GLM-5 targets: configurations of a few thousand parameters, and random weights laid out as
checkpoints are."""

from typing import Any

import torch

from engines import tiny_config
from random_moe import fused, glm4_moe_config, random_moe


def glm5_config(**changes: Any) -> dict[str, Any]:
    """A GLM-5 config.json: one dense layer, one that shares its selection, a small top-k."""
    config = glm4_moe_config(
        **{
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "attention_bias": False,
            "index_head_dim": 32,
            "index_n_heads": 16,
            "index_topk": 12,
            "indexer_types": ["full", "shared"],
            "kv_lora_rank": 32,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "rms_norm_eps": 1e-5,
            "v_head_dim": 32,
        }
        | changes
    )
    for key in ("head_dim", "partial_rotary_factor", "use_qk_norm"):
        config.pop(key, None)
    return config


def random_glm5(config: dict[str, Any], *, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """A state dict for config.json; indexer scores far enough apart that float32 and float64
    choose alike."""
    like_glm4 = tiny_config(**config) | {"model_type": "glm4_moe", "use_qk_norm": False}
    if config.get("mlp_layer_types"):
        like_glm4["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    tensors = {
        name: tensor
        for name, tensor in random_moe(like_glm4, dtype=dtype, seed=seed).items()
        if ".self_attn." not in name
    }
    generator = torch.Generator().manual_seed(seed + 2)

    def matrix(*shape: int, size: float = 0.15) -> torch.Tensor:
        return (size * torch.randn(*shape, generator=generator)).to(dtype)

    def vector(features: int, mean: float) -> torch.Tensor:
        return (mean + 0.2 * torch.randn(features, generator=generator)).to(dtype)

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    index, index_heads = config["index_head_dim"], config["index_n_heads"]
    for layer, kind in enumerate(indexer_types(config)):
        part = {
            "q_a_proj.weight": matrix(q_rank, hidden),
            "q_a_layernorm.weight": vector(q_rank, 1.0),
            "q_b_proj.weight": matrix(heads * (nope + rope), q_rank),
            "kv_a_proj_with_mqa.weight": matrix(kv_rank + rope, hidden),
            "kv_a_layernorm.weight": vector(kv_rank, 1.0),
            "kv_b_proj.weight": matrix(heads * (nope + value), kv_rank),
            "o_proj.weight": matrix(hidden, heads * value),
        }
        if config["attention_bias"]:
            part |= {
                "q_a_proj.bias": vector(q_rank, 0.0),
                "kv_a_proj_with_mqa.bias": vector(kv_rank + rope, 0.0),
                "o_proj.bias": vector(hidden, 0.0),
            }
        if kind == "full":
            part |= {
                "indexer.wq_b.weight": matrix(index_heads * index, q_rank),
                "indexer.wk.weight": matrix(index, hidden),
                "indexer.k_norm.weight": vector(index, 1.0),
                "indexer.k_norm.bias": vector(index, 0.0),
                "indexer.weights_proj.weight": matrix(index_heads, hidden),
            }
        tensors |= {f"model.layers.{layer}.self_attn.{n}": t for n, t in part.items()}
    return tensors


def indexer_types(config: dict[str, Any]) -> list[str]:
    """Per layer "full" or "shared"; where config.json does not list them, as transformers
    derives them."""
    if config.get("indexer_types") is None:
        import transformers

        return list(transformers.GlmMoeDsaConfig(**config).indexer_types)
    return list(config["indexer_types"])


def transformers_model(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' model of config.json in float32, with these weights."""
    import transformers

    settings = transformers.GlmMoeDsaConfig(**config, attn_implementation="eager")
    model = transformers.GlmMoeDsaForCausalLM(settings).float().eval()
    missing, unexpected = model.load_state_dict(fused(tensors), strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert (missing, unexpected) == (tied, [])
    if tied:
        model.tie_weights()
    return model
