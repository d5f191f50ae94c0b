"""Writing checkpoints for tests and benchmarks, as Hugging Face and ModelOpt lay them out."""

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trtree.build.checkpoint.patterns import matcher
from trtree.build.checkpoint.quantization import SIDECAR
from trtree.build.checkpoint.reader import INDEX, SINGLE
from trtree.build.checkpoint.scheme import ALGORITHMS, QuantizationConfig
from trtree.plugins.nvfp4_linear import format as nvfp4

# Inputs up to 8 in magnitude are covered; beyond, they saturate.
DEFAULT_INPUT_SCALE = 8.0 / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
DEFAULT_EXCLUDE = ("lm_head", "model.embed_tokens")
# Linears of one input share a global scale, as ModelOpt's exporter makes them.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_WRITTEN = ("NVFP4", "W4A16_NVFP4")

Tensors = Iterable[tuple[str, torch.Tensor]]


def write_checkpoint(
    directory: Path,
    tensors: Tensors,
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int | None = None,
    quantization: QuantizationConfig | None = None,
) -> None:
    """Write a checkpoint directory; it appears complete or not at all.

    Args:
        directory: must not exist yet.
        tensors: consumed one at a time; at most one shard's are held.
        config: config.json.
        max_shard_bytes: start a new shard before exceeding this; None for one file.
        quantization: written to hf_quant_config.json and into config.json.

    Raises:
        FileExistsError: the directory exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial.chmod(0o755)
        config = dict(config)
        if quantization is not None:
            config["quantization_config"] = _inline(quantization)
            _write_json(partial / SIDECAR, _sidecar(quantization))
        _write_json(partial / "config.json", config)
        _write_shards(partial, tensors, max_shard_bytes)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def quantize_state_dict(
    tensors: Tensors,
    *,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    input_scales: Mapping[str, float] | float = DEFAULT_INPUT_SCALE,
    algorithm: str = "NVFP4",
    fused: Sequence[Sequence[str]] = FUSED,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace every linear's float weight by ModelOpt's NVFP4 tensors; pass the rest on.

    Give the same algorithm and ``exclude`` to ``write_checkpoint`` as its quantization.

    Args:
        tensors: names and tensors; a 2-D ``*.weight`` is a linear.
        exclude: patterns of modules to leave alone.
        input_scales: per module, or one for all; unused by W4A16_NVFP4.
        fused: sibling modules that get one weight_scale_2, the largest of theirs; pass
            () to give every module its own.

    Raises:
        ValueError: an unknown algorithm, a module without an input scale, a weight that
            cannot be quantized.
    """
    if algorithm not in _WRITTEN:
        raise ValueError(f"algorithm {algorithm!r} is none of {', '.join(_WRITTEN)}")
    excluded = matcher(exclude)
    group_of = {module: tuple(group) for group in fused for module in group}
    waiting: dict[tuple[str, ...], dict[str, torch.Tensor]] = defaultdict(dict)

    def quantized(group: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        amax = max(weight.abs().max().float() for weight in group.values())
        scale = amax / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        for module, weight in group.items():
            try:
                result = nvfp4.quantize_weight(weight, scale)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from None
            yield f"{module}.weight", result.codes
            yield f"{module}.weight_scale", result.block_scale
            yield f"{module}.weight_scale_2", result.global_scale.clone()
            if ALGORITHMS[algorithm].activations == "nvfp4":
                yield f"{module}.input_scale", _input_scale(input_scales, module)

    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if part != "weight" or tensor.dim() != 2 or excluded.fullmatch(module):
            yield name, tensor
            continue
        parent, _, leaf = module.rpartition(".")
        group = group_of.get(leaf, (leaf,))
        key = tuple(f"{parent}.{sibling}".lstrip(".") for sibling in group)
        waiting[key][module] = tensor
        if len(waiting[key]) == len(group):
            yield from quantized(waiting.pop(key))
    for group_tensors in waiting.values():  # groups some of whose modules do not exist
        yield from quantized(group_tensors)


def _input_scale(scales: Mapping[str, float] | float, module: str) -> torch.Tensor:
    if isinstance(scales, Mapping):
        if module not in scales:
            raise ValueError(f"{module}: no input scale was given for it")
        return torch.tensor(scales[module])
    return torch.tensor(float(scales))


def _sidecar(quantization: QuantizationConfig) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": quantization.algorithm,
            "kv_cache_quant_algo": quantization.kv_cache,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": list(quantization.exclusions),
        },
    }


def _inline(quantization: QuantizationConfig) -> dict[str, Any]:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
    if ALGORITHMS[quantization.algorithm].activations == "nvfp4":
        group["input_activations"] = numbers
    inline: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": list(quantization.exclusions),
        "quant_algo": quantization.algorithm,
        "producer": {"name": "modelopt"},
        "quant_method": "modelopt",
    }
    if quantization.kv_cache is not None:
        inline["kv_cache_scheme"] = quantization.kv_cache
    return inline


def _write_shards(directory: Path, tensors: Tensors, max_shard_bytes: int | None) -> None:
    files: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors, max_shard_bytes):
        path = directory / f"{len(files) + 1}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        files[0][0].rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, (path, names) in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        path.rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / INDEX, index)


def _shards(tensors: Tensors, max_bytes: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Groups of tensors that fit in max_bytes; a larger tensor stands alone. At least one."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and max_bytes is not None and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
