"""Checkpoints: the target by ModelOpt as NVFP4, the drafter in z-lab's layout; and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trtree.plugins.nvfp4_linear import format as nvfp4

from .data import END, IM_END, MASK, SPECIAL_TOKENS
from .model import BLOCK_SIZE, TAPS, Drafter, Linears, Precision, Shape, Target
from .nvfp4 import fake_quantize_weights

POSITIONS = 2048
CHAT_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def linear_names(layer: int) -> list[list[str]]:
    """Hugging Face names of a layer's linears, grouped as `Target.linears` groups them."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return [
        [f"{attention}.{name}_proj" for name in "qkv"],
        [f"{attention}.o_proj"],
        [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
        [f"{mlp}.down_proj"],
    ]


def unquantized(target: Target) -> dict[str, Tensor]:
    """The embedding and the norms, by Hugging Face name."""
    named: dict[str, Tensor] = {
        "model.embed_tokens.weight": target.embed,
        "model.norm.weight": target.norm.weight,
    }
    for i, layer in enumerate(target.decoder_layers()):
        prefix = f"model.layers.{i}"
        named[f"{prefix}.input_layernorm.weight"] = layer.input_norm.weight
        named[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm.weight
        named[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm.weight
        named[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm.weight
    return named


def grouped(target: Target) -> list[tuple[list[str], Linears]]:
    """(names, Linears) of every group, in the order of the layers."""
    names = [group for i in range(target.shape.layers) for group in linear_names(i)]
    return list(zip(names, target.linears(), strict=True))


def hugging_face_config(shape: Shape) -> Any:
    """The target's shape in Hugging Face's words: a Qwen3Config."""
    return Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=END,
    )


@torch.no_grad()
def hugging_face_model(target: Target, dtype: torch.dtype) -> Any:
    """The target as transformers' Qwen3ForCausalLM, its linears already rounded to NVFP4 values.

    Rounding here, with one scale for q/k/v and for gate/up, keeps what W4A4 training saw:
    ModelOpt's own rounding of such values finds the same codes.
    """
    state = {name: tensor.detach().clone() for name, tensor in unquantized(target).items()}
    for names, group in grouped(target):
        for name, value in zip(names, fake_quantize_weights(*group.weights), strict=True):
            state[f"{name}.weight"] = value.detach().clone()
    model = Qwen3ForCausalLM(hugging_face_config(target.shape)).to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) != {"lm_head.weight"} or unexpected:
        raise ValueError(f"the target's tensors: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def export_target(target: Target, tokenizer: Tokenizer, calibration: Tensor, folder: Path) -> None:
    """Calibrate on ids [n, T], quantize and export with ModelOpt; add the tokenizer's files."""
    model = hugging_face_model(target, torch.bfloat16)

    def forward(network: Any) -> None:
        for part in torch.split(calibration, 8):
            network(part)

    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(folder))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[IM_END],
        pad_token=SPECIAL_TOKENS[END],
        mask_token=SPECIAL_TOKENS[MASK],
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        model_max_length=POSITIONS,
    ).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    generation = {"eos_token_id": [IM_END, END], "pad_token_id": END, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


@torch.no_grad()
def load_target(folder: Path, shape: Shape, precision: Precision) -> Target:
    """The exported target with dequantized weights, for inference."""
    target = Target(shape)
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in unquantized(target).items():
        parameter.data = tensors[name].float()
    for names, group in grouped(target):
        for name, weight in zip(names, group.weights, strict=True):
            parts = [
                tensors[f"{name}.{key}"] for key in ("weight", "weight_scale", "weight_scale_2")
            ]
            weight.data = nvfp4.dequantize(nvfp4.QuantizedTensor(*parts))
            group.scale.copy_(tensors[f"{name}.input_scale"])
        group.frozen = True
    target.set_precision(precision)
    return target.requires_grad_(False).eval()


def drafter_key(name: str) -> str:
    """z-lab's name of a drafter's tensor."""
    for part, kinds in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for kind in kinds:
            name = name.replace(f".{kind}_proj", f".{part}.{kind}_proj")
    return name.replace(".q_norm", ".self_attn.q_norm").replace(".k_norm", ".self_attn.k_norm")


def export_drafter(drafter: Drafter, target: Shape, folder: Path) -> None:
    """Write config.json and model.safetensors in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = drafter.shape
    tensors = {drafter_key(k): v.bfloat16().contiguous() for k, v in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "vocab_size": shape.vocab,
        "max_position_embeddings": POSITIONS,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": target.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "dtype": "bfloat16",
    }
    _write_json(folder / "config.json", config)


def load_drafter(folder: Path, shape: Shape) -> Drafter:
    """The exported drafter in float32."""
    drafter = Drafter(shape)
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({k: tensors[drafter_key(k)].float() for k in drafter.state_dict()})
    return drafter.requires_grad_(False).eval()
