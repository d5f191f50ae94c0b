"""Tiny checkpoints made on the fly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trtree.build.checkpoint import Checkpoint, QuantizationConfig
from trtree.build.checkpoint.write import DEFAULT_EXCLUDE, quantize_state_dict, write_checkpoint

DEMO = Path(__file__).parents[3] / "configs" / "demo"
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 4, 2, 16, 48, 40

StateDict = dict[str, torch.Tensor]


@pytest.fixture
def demo() -> Path:
    """The repository's pair: ``target_nvfp4`` and ``drafter``."""
    return DEMO


@pytest.fixture
def dense() -> StateDict:
    """A Qwen3-like model of one layer in bf16; each linear has its own magnitude."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    for i, (module, shape) in enumerate(shapes.items()):
        weight = torch.randn(shape, generator=generator) * 0.02 * (i + 1)
        tensors[f"model.layers.0.{module}.weight"] = weight
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{norm}.weight"] = torch.ones(HIDDEN)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


@pytest.fixture
def quantized(dense: StateDict) -> StateDict:
    """``dense`` in ModelOpt's NVFP4 layout, every linear with its own global scale."""
    return dict(quantize_state_dict(dense.items(), fused=()))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write tensors, by default as an NVFP4 checkpoint; returns its directory."""

    def write(
        tensors: StateDict,
        *,
        algorithm: str | None = "NVFP4",
        exclude: tuple[str, ...] = DEFAULT_EXCLUDE,
        config: dict[str, Any] = CONFIG,
        kv_cache: str | None = None,
        directory: str = "model",
        **options: Any,
    ) -> Path:
        path = tmp_path / directory
        quantization = QuantizationConfig(algorithm, exclude, kv_cache) if algorithm else None
        write_checkpoint(path, tensors.items(), config, quantization=quantization, **options)
        return path

    return write


@pytest.fixture
def open_tensors(write: Callable[..., Path]) -> Callable[..., Checkpoint]:
    """Write as ``write`` does and open the result."""
    return lambda tensors, **options: Checkpoint.open(write(tensors, **options))


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[dict[str, Any]], None]], None]:
    """Change a JSON file in place."""

    def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return edit
