"""Targets with experts: configurations of a few thousand parameters, and random weights
laid out as checkpoints are (one module per expert)."""

from typing import Any

import torch

from engines import tiny_config
from random_target import random_target


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE config.json; its first layer is dense, its second sparse."""
    return tiny_config(
        **{
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        }
        | changes
    )


def glm4_moe_config(**changes: Any) -> dict[str, Any]:
    """A GLM-4.5 config.json; its first layer is dense, its second sparse."""
    return tiny_config(
        **{
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "routed_scaling_factor": 2.5,
            "topk_group": 2,
            "use_qk_norm": True,
        }
        | changes
    )


def random_moe(config: dict[str, Any], *, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    """A state dict for config.json, router biases large enough to change the choice."""
    glm = config["model_type"] == "glm4_moe"
    dense = random_target(config, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def matrix(*shape: int) -> torch.Tensor:
        return (0.15 * torch.randn(*shape, generator=generator)).to(dtype)

    hidden, size = config["hidden_size"], config["moe_intermediate_size"]
    count = config["n_routed_experts" if glm else "num_experts"]
    tensors = {}
    for name, tensor in dense.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        no_norm = (
            glm and not config["use_qk_norm"] and name.endswith(("q_norm.weight", "k_norm.weight"))
        )
        no_bias = glm and name.endswith("o_proj.bias")
        if not no_norm and not no_bias and not (".mlp." in name and is_sparse(config, layer)):
            tensors[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        if not is_sparse(config, layer):
            continue
        at = f"model.layers.{layer}.mlp."
        # Logits far enough apart that float32 and float64 choose alike.
        tensors[f"{at}gate.weight"] = 4 * matrix(count, hidden)
        mlps = {f"experts.{i}": size for i in range(count)}
        if glm:
            bias = 0.2 * torch.randn(count, generator=generator)
            tensors[f"{at}gate.e_score_correction_bias"] = bias
            mlps["shared_experts"] = size * config["n_shared_experts"]
        for module, width in mlps.items():
            tensors[f"{at}{module}.gate_proj.weight"] = matrix(width, hidden)
            tensors[f"{at}{module}.up_proj.weight"] = matrix(width, hidden)
            tensors[f"{at}{module}.down_proj.weight"] = matrix(hidden, width)
    return tensors


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer's MLP is one of experts."""
    if config["model_type"] == "glm4_moe":
        return bool(layer >= config["first_k_dense_replace"])
    step = config["decoder_sparse_step"]
    return bool(layer not in config["mlp_only_layers"] and (layer + 1) % step == 0)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same state dict with experts stacked, as transformers' modules hold them."""
    result = {name: t for name, t in tensors.items() if ".experts." not in name}
    layers = {name.partition("experts.")[0] for name in tensors if ".experts." in name}
    for at in layers:
        routed = f"{at}experts."
        count = sum(n.startswith(routed) and n.endswith("up_proj.weight") for n in tensors)

        def of(i: int, which: str, at: str = at) -> torch.Tensor:
            return tensors[f"{at}experts.{i}.{which}_proj.weight"]

        gate_up = [torch.cat([of(i, "gate"), of(i, "up")]) for i in range(count)]
        result[f"{at}experts.gate_up_proj"] = torch.stack(gate_up)
        down = torch.stack([of(i, "down") for i in range(count)])
        result[f"{at}experts.down_proj"] = down
    return result
