"""Engines and checkpoints for tests."""

import itertools
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from random_target import random_target
from trtree.build import builder
from trtree.build.checkpoint import QuantizationConfig
from trtree.build.checkpoint.write import (
    DEFAULT_EXCLUDE,
    DEFAULT_INPUT_SCALE,
    quantize_state_dict,
    write_checkpoint,
)
from trtree.build.options import read_options
from trtree.runtime.bench.train_demo.text import conversations

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
# Exporters leave heads, embeddings, routers and what feeds a recurrence's gates alone.
EXCLUDE = (
    *DEFAULT_EXCLUDE,
    "model.layers.*.mlp.gate",
    "*.shared_expert_gate",
    "*.in_proj_a",
    "*.in_proj_b",
    "*.in_proj_ba",
    "*.indexer.weights_proj",
)
DEMO_VOCAB: int = json.loads((DEMO / "target_nvfp4" / "config.json").read_text())["vocab_size"]
# Questions that the demo pair knows how to answer: all but the last in more than 70 tokens.
DEMO_PROMPTS = (DEMO / "prompts.txt").read_text().splitlines()


def build_demo(output: Path, **options: Any) -> Path:
    """The demo engine at ``output``, with these build options changed."""
    chosen = read_options(ROOT / "configs" / "demo.yaml")
    return builder.write(builder.describe(chosen.with_changes({"output": output, **options})))


def demo_text(count: int) -> str:
    """That many conversations of the kind the demo pair knows, new to it."""
    found = itertools.islice(conversations(seed=3, held_out=True), count)
    return "\n".join(f"{c.question}\n{c.answer}" for c in found)


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


def sliding_drafter(directory: Path) -> Path:
    """The demo's, but its first layer slides, and so is causal inside the block."""
    if not directory.exists():
        shutil.copytree(DEMO / "drafter", directory)
        config = json.loads((directory / "config.json").read_text())
        kinds = ["sliding_attention", "full_attention"]
        config |= {"layer_types": kinds, "sliding_window": 5, "use_sliding_window": True}
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_target(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    quantization: QuantizationConfig | None = None,
) -> Path:
    """A checkpoint directory with a tokenizer for its vocabulary."""
    write_checkpoint(directory, tensors.items(), config, quantization=quantization)
    write_tokenizer(directory, config["vocab_size"])
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """One token per number below ``vocab_size``: its digits."""
    words = {str(i): i for i in range(vocab_size)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(directory / "tokenizer.json"))


def edit_tensors(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Of a checkpoint of one shard."""
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def edit_config(checkpoint: Path, **changes: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (checkpoint / "config.json").write_text(json.dumps(config))


def random_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    algorithm: str | None = None,
    kv_cache: str | None = None,
) -> Path:
    """A bf16 checkpoint of random weights, quantized by ``algorithm`` if one is given.

    With NVFP4_AWQ, o_proj, down_proj and experts scale their inputs; with NVFP4_SVD, every
    linear does, and has low-rank factors. kv_cache: what its cache is calibrated for, FP8 or
    NVFP4: every scale another, and some numbers beyond it.
    """
    from random_glm5 import random_glm5  # which build on this module
    from random_hybrid import random_hybrid
    from random_moe import random_moe

    make = random_target
    if "linear_key_head_dim" in config:
        make = random_hybrid
    elif "kv_lora_rank" in config:
        make = random_glm5
    elif "moe_intermediate_size" in config:
        make = random_moe
    tensors = make(config, dtype=torch.bfloat16)
    if algorithm is None:
        return write_target(directory, tensors, config)
    scales = algorithm in ("NVFP4_AWQ", "NVFP4_SVD")
    quantized = dict(
        quantize_state_dict(
            tensors.items(),
            exclude=EXCLUDE,
            algorithm="NVFP4" if scales else algorithm,
            input_scales=_scales(tensors),
        )
    )
    if scales:
        _scale_inputs(quantized, config, everywhere=algorithm == "NVFP4_SVD")
    if algorithm == "NVFP4_SVD":
        _add_factors(quantized)
    if kv_cache:
        quantized |= kv_scales(tensors)
    quantization = QuantizationConfig(algorithm, EXCLUDE, kv_cache)
    return write_target(directory, quantized, config, quantization)


def _scale_inputs(
    quantized: dict[str, torch.Tensor], config: Mapping[str, Any], *, everywhere: bool
) -> None:
    """As ModelOpt does: linears of one input share their vector, and so do the experts of the
    families that it averages them for."""
    averaged = config["model_type"].startswith("qwen3") and not everywhere
    scaled = re.compile(r".*(o_proj|down_proj|\.experts\.\d+\.(gate|up)_proj)\.weight")
    for name in [n for n in quantized if n.endswith(".weight_scale_2")]:
        name = name.removesuffix("_scale_2")
        if not everywhere and not scaled.fullmatch(name):
            continue
        shared = re.sub(r"experts\.\d+\.", "experts.", name) if averaged else name
        generator = torch.Generator().manual_seed(zlib.crc32(_of_input(shared).encode()))
        vector = 0.5 + torch.rand(2 * quantized[name].shape[1], generator=generator)
        quantized[name.replace(".weight", ".pre_quant_scale")] = vector.bfloat16()


def _of_input(name: str) -> str:
    """One name for linears that read the same."""
    return re.sub(r"[qkv]_proj", "qkv", re.sub(r"(gate|up)_proj", "gate_up", name))


def _add_factors(quantized: dict[str, torch.Tensor], rank: int = 8) -> None:
    """Of every NVFP4 linear, as ModelOpt names them; linears that read the same share A."""
    for name in [n for n in quantized if n.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        rows, half = quantized[f"{module}.weight"].shape
        for which, label, shape in (
            ("a", _of_input(module), (rank, 2 * half)),
            ("b", module, (rows, rank)),
        ):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{which}{label}".encode()))
            factor = 0.2 * torch.randn(shape, generator=generator)
            quantized[f"{module}.weight_quantizer._svdquant_lora_{which}"] = factor.bfloat16()


def kv_scales(tensors: Iterable[str]) -> dict[str, torch.Tensor]:
    """ModelOpt's scales of a quantized KV cache, for these weights."""
    projection = re.compile(r".*self_attn\.([kv])_proj\.weight")
    found = [match for name in tensors if (match := projection.fullmatch(name))]
    return {
        f"{match[0].removesuffix('weight')}{match[1]}_scale": torch.tensor(0.004 + 0.002 * index)
        for index, match in enumerate(found)
    }


def _scales(tensors: Iterable[str]) -> Mapping[str, float]:
    """An input scale for each module; those of a layer's experts differ."""
    return {
        name.removesuffix(".weight"): DEFAULT_INPUT_SCALE * (0.5 + index % 5 / 4)
        if ".experts." in name
        else DEFAULT_INPUT_SCALE
        for index, name in enumerate(tensors)
    }
