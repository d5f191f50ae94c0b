"""Random checkpoints of real shapes, for benchmarks: no weights are needed to time a build."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trtree.build.checkpoint.json_file import read_json
from trtree.build.checkpoint.quantization import read_quantization
from trtree.build.checkpoint.scheme import QuantizationConfig
from trtree.build.checkpoint.write import DEFAULT_INPUT_SCALE, write_checkpoint
from trtree.build.models import family_of
from trtree.build.network.graph import Graph, WeightInfo
from trtree.build.network.network import Owner, Weight, tensor_name
from trtree.plugins.nvfp4_linear.format import BLOCK

SHARD_BYTES = 2 << 30


def write_random(directory: Path, model: Path, *, seed: int = 0) -> None:
    """Write a checkpoint of the shapes and quantization that ``model`` configures.

    Args:
        directory: must not exist yet.
        model: a directory with config.json and, if quantized, hf_quant_config.json.

    Raises:
        CheckpointError, NetworkError: the configuration is missing, invalid or unsupported.
    """
    config = read_json(model / "config.json")
    quantization = read_quantization(model, config)
    write_checkpoint(
        directory,
        _tensors(config, quantization, torch.Generator().manual_seed(seed)),
        config,
        max_shard_bytes=SHARD_BYTES,
        quantization=quantization,
    )
    # A build wants a tokenizer to copy; the words of this one are its ids.
    words = {str(i): i for i in range(int(config["vocab_size"]))}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(directory / "tokenizer.json"))


class _Shapes:
    """A weight source that takes every implied shape as bf16 or, where covered, NVFP4."""

    def __init__(self, quantization: QuantizationConfig | None) -> None:
        self._quantization = quantization

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        plain = len(implied) == 1 or module.endswith(("embed_tokens", "lm_head"))
        quantization = self._quantization
        activations = quantization.activations_of(module) if quantization else None
        if plain or activations is None:
            return WeightInfo("dense", implied, "bfloat16")
        return WeightInfo("nvfp4", implied, "nvfp4", False, activations)


def _tensors(
    config: dict[str, Any], quantization: QuantizationConfig | None, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    family = family_of(config)
    graph = Graph("target", _Shapes(quantization))
    family.build(graph, family.parse(config), ())
    # The network names fused weights; a checkpoint holds their modules.
    for weight in graph.network.weights.values():
        for module, size in zip(weight.modules, weight.out_sizes, strict=True):
            yield from _module(module, size, weight, generator)


def _module(
    module: str, size: int, weight: Weight, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    if len(weight.shape) == 1:
        yield tensor_name(module), torch.ones(size, dtype=torch.bfloat16)
        return
    shape = (size, weight.shape[-1])
    if weight.kind == "dense":
        yield f"{module}.weight", _normal(shape, generator)
    else:
        rows, k = shape
        codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
        scale = 1 + 7 * torch.rand(rows, k // BLOCK, generator=generator)
        yield f"{module}.weight", codes
        yield f"{module}.weight_scale", scale.to(torch.float8_e4m3fn)
        yield f"{module}.weight_scale_2", torch.tensor(k**-0.5 / 16)
        if weight.activations == "nvfp4":
            yield f"{module}.input_scale", torch.tensor(DEFAULT_INPUT_SCALE)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal bf16 numbers, a million of them over and over: making more takes minutes."""
    rows, k = shape
    some: torch.Tensor = torch.randn(max(1, (1 << 20) // k), k, generator=generator).bfloat16()
    some = some * float(k) ** -0.5
    return some.repeat(-(-rows // len(some)), 1)[:rows].contiguous()
