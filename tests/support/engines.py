"""Engines and checkpoints for tests."""

from pathlib import Path
from typing import Any

import torch

from trtree.build import builder
from trtree.build.checkpoint import QuantizationConfig
from trtree.build.checkpoint.write import DEFAULT_EXCLUDE, quantize_state_dict, write_checkpoint
from trtree.build.options import read_options

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"


def build_demo(output: Path, **options: Any) -> Path:
    """The demo engine at ``output``, with these build options changed."""
    chosen = read_options(ROOT / "configs" / "demo.yaml")
    return builder.write(builder.describe(chosen.with_changes({"output": output, **options})))


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3 config.json of a few thousand parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "vocab_size": 80,
    } | changes


def write_target(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """A checkpoint directory with the demo's tokenizer."""
    write_checkpoint(directory, tensors.items(), config)
    (directory / "tokenizer.json").write_bytes((DEMO / "target_nvfp4/tokenizer.json").read_bytes())
    return directory


def random_target(
    directory: Path, config: dict[str, Any], *, algorithm: str | None = None, seed: int = 0
) -> Path:
    """A bf16 Qwen3 checkpoint of random weights, quantized by ``algorithm`` if one is given.

    Norms are off 1, so that a missing one shows.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in target_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[1] ** -0.5
        tensors[name] = value.bfloat16()
    quantization = None
    items = tensors.items()
    if algorithm:
        quantization = QuantizationConfig(algorithm, DEFAULT_EXCLUDE)
        items = dict(quantize_state_dict(tensors.items(), algorithm=algorithm)).items()
    write_checkpoint(directory, items, config, quantization=quantization)
    (directory / "tokenizer.json").write_bytes((DEMO / "target_nvfp4/tokenizer.json").read_bytes())
    return directory


def target_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Qwen3 target."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
