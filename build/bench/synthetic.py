"""Random checkpoints of real shapes, for benchmarks: no weights are needed to time a build."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trtree.build.checkpoint import text_part
from trtree.build.checkpoint.json_file import read_json
from trtree.build.checkpoint.quantization import read_quantization
from trtree.build.checkpoint.scheme import QuantizationConfig
from trtree.build.checkpoint.write import DEFAULT_INPUT_SCALE, write_checkpoint
from trtree.build.models import family_of
from trtree.build.network.graph import Graph, WeightInfo
from trtree.build.network.network import Network, Owner, Weight, tensor_name
from trtree.plugins.nvfp4_linear.format import BLOCK

SHARD_BYTES = 2 << 30
_SOME = 1 << 18  # numbers that are random; a weight repeats them, as making more takes minutes


def write_random(
    directory: Path,
    model: Path,
    *,
    seed: int = 0,
    layers: int | None = None,
    plain: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a checkpoint of the shapes and quantization that ``model`` configures.

    Args:
        directory: must not exist yet.
        model: a directory with config.json and, if quantized, hf_quant_config.json.
        layers: instead of as many as the model has.
        plain: bf16, whatever the model's quantization.
        progress: told the bytes of each tensor.

    Raises:
        CheckpointError, NetworkError: the configuration is missing, invalid or unsupported.
    """
    config, quantization = _read(model, layers, plain)
    tensors = _tensors(config, quantization, torch.Generator().manual_seed(seed))

    def told() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            progress(tensor.nbytes)

    write_checkpoint(
        directory, told(), config, max_shard_bytes=SHARD_BYTES, quantization=quantization
    )
    # A build wants a tokenizer to copy; the words of this one are its ids.
    words = {str(i): i for i in range(int(config["vocab_size"]))}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(directory / "tokenizer.json"))


def checkpoint_bytes(model: Path, *, layers: int | None = None, plain: bool = False) -> int:
    """About the bytes that ``write_random`` writes: those of codes, block scales and floats."""
    config, quantization = _read(model, layers, plain)
    total = 0
    for weight in _network(config, quantization).weights.values():
        elements = math.prod(weight.shape)
        blocks = elements // BLOCK
        total += elements // 2 + blocks if weight.kind == "nvfp4" else 2 * elements
    return total


def _read(
    model: Path, layers: int | None, plain: bool
) -> tuple[dict[str, Any], QuantizationConfig | None]:
    file = model / "config.json"
    config = text_part.text_config(read_json(file), str(file))
    quantization = text_part.quantization(read_quantization(model, config))
    if plain:
        quantization = None
        config.pop("quantization_config", None)
    if layers is not None:
        config |= {"num_hidden_layers": layers, "layer_types": None}
    return config, quantization


class _Shapes:
    """A weight source that takes every implied shape as bf16 or, where covered, NVFP4.

    biased: modules of attention that have biases.
    """

    def __init__(self, quantization: QuantizationConfig | None, biased: tuple[str, ...]) -> None:
        self._quantization = quantization
        self._biased = biased

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        plain = len(implied) == 1 or module.endswith(("embed_tokens", "lm_head"))
        quantization = self._quantization
        biased = ".self_attn." in module and module.endswith(self._biased)
        activations = quantization.activations_of(module) if quantization else None
        if plain or activations is None:
            return WeightInfo("dense", implied, "bfloat16", biased)
        return WeightInfo("nvfp4", implied, "nvfp4", biased, activations)


def _network(config: dict[str, Any], quantization: QuantizationConfig | None) -> Network:
    family = family_of(config)
    biased = family.biased if config.get("attention_bias") else ()
    graph = Graph("target", _Shapes(quantization, biased))
    family.build(graph, family.parse(config), ())
    return graph.network


def _tensors(
    config: dict[str, Any], quantization: QuantizationConfig | None, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    network = _network(config, quantization)
    # The network names fused weights; a checkpoint holds their modules.
    for weight in network.weights.values():
        for module, size in zip(weight.modules, weight.out_sizes, strict=True):
            yield from _module(module, size, weight, generator)


def _module(
    module: str, size: int, weight: Weight, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    if len(weight.shape) == 1:
        yield tensor_name(module), torch.full((size,), 1 - weight.offset, dtype=torch.bfloat16)
        return
    if weight.has_bias:
        yield f"{module}.bias", torch.zeros(size, dtype=torch.bfloat16)
    shape = (size, weight.shape[-1])
    if weight.kind == "dense":
        yield f"{module}.weight", _normal(shape, generator)
    else:
        rows, k = shape
        some = min(rows, max(1, _SOME // k))
        codes = torch.randint(0, 256, (some, k // 2), dtype=torch.uint8, generator=generator)
        scale = 1 + 7 * torch.rand(some, k // BLOCK, generator=generator)
        yield f"{module}.weight", _repeated(codes, rows)
        yield f"{module}.weight_scale", _repeated(scale.to(torch.float8_e4m3fn), rows)
        yield f"{module}.weight_scale_2", torch.tensor(k**-0.5 / 16)
        if weight.activations == "nvfp4":
            yield f"{module}.input_scale", torch.tensor(DEFAULT_INPUT_SCALE)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal bf16 numbers."""
    rows, k = shape
    some: torch.Tensor = torch.randn(max(1, _SOME // k), k, generator=generator).bfloat16()
    return _repeated(some * float(k) ** -0.5, rows)


def _repeated(some: torch.Tensor, rows: int) -> torch.Tensor:
    return some.repeat(-(-rows // len(some)), 1)[:rows].contiguous()
