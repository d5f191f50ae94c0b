"""What a checkpoint is, from its headers and configuration, whether or not it can be built."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtree.build import builder
from trtree.build.checkpoint import (
    Checkpoint,
    CheckpointError,
    NoWeightsError,
    dflash_config,
    headers,
    text_part,
)
from trtree.build.checkpoint.fused_experts import split
from trtree.build.checkpoint.json_file import read_json
from trtree.build.checkpoint.patterns import left_out, matcher
from trtree.build.checkpoint.quantization import read_quantization
from trtree.build.checkpoint.reader import read_headers
from trtree.build.layers import Layers
from trtree.build.models import FAMILIES
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions, OptionError
from trtree.build.source import CheckpointSource
from trtree.build.text_files import size_text

_RANKS = (1, 2, 4, 8)
_LAYER_OR_EXPERT = re.compile(r"(?<=\.)\d+(?=\.)")
_UNSUPPORTED = f"cannot be built; supported: {', '.join(sorted(FAMILIES))}"

Row = tuple[str, ...]


@dataclass
class Inspection:
    """Tables to be shown: ``facts`` of two columns, ``groups`` of modules that are stored
    alike, and problems, each one line that names its tensor."""

    facts: list[Row] = field(default_factory=list)
    groups: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def inspect(directory: Path) -> Inspection:
    """Describe the checkpoint in ``directory``; of tensors' bytes it reads those of vectors that
    scale inputs, and of low-rank factors.

    Raises:
        CheckpointError: it cannot be read at all: no config.json, a damaged file.
    """
    config = read_json(directory / "config.json")
    found = Inspection()
    try:
        tensors = read_headers(directory)
    except NoWeightsError as error:
        _configuration(directory, config, found)
        found.problems.append(f"{error}; --plan works from configuration files alone")
        return found
    quantization = None
    try:
        text = text_part.text_config(config, str(directory / "config.json"))
        quantization = text_part.quantization(read_quantization(directory, config))
        tensors = split(headers.renamed(text_part.tensors(tensors)), text)
        config = text
        ignored = matcher(left_out(config))
        used = {name: info for name, info in tensors.items() if not ignored.fullmatch(name)}
        if len(used) < len(tensors):
            found.facts.append(
                ("left out", f"{len(tensors) - len(used)} tensors of prediction layers or vision")
            )
        found.problems += headers.faults(used, quantization)
    except CheckpointError as error:
        found.problems.append(str(error))
    checkpoint = Checkpoint(directory, config, quantization, tensors)
    found.facts += _family(checkpoint, found.problems)
    found.facts += _layers(config)
    found.facts += _quantization(checkpoint)
    found.facts += _sizes(checkpoint)
    found.groups += _groups(checkpoint)
    return found


def _configuration(directory: Path, config: dict[str, Any], found: Inspection) -> None:
    """What configuration files say without weights."""
    name = str((config.get("architectures") or ["none named"])[0])
    try:
        if name in FAMILIES:
            builder.plan(BuildOptions(checkpoint=directory))
            found.facts.append(("family", f"{name}: can be built"))
        elif _is_drafter(name, config):
            drafter = dflash_config.parse(config, directory / "config.json")
            found.facts += _drafter(name, drafter)
        else:
            found.facts.append(("family", f"{name}: {_UNSUPPORTED}"))
        found.facts += _layers(config)
        quantization = text_part.quantization(read_quantization(directory, config))
        found.facts += _quantization(Checkpoint(directory, config, quantization, {}))
    except (CheckpointError, NetworkError, OptionError) as error:
        found.problems.append(str(error))


def _is_drafter(name: str, config: Mapping[str, Any]) -> bool:
    return "DFlash" in name or "dflash" in str(config.get("speculators_model_type"))


def _drafter(name: str, drafter: dflash_config.DrafterConfig) -> Iterator[Row]:
    yield "family", f"{name}: a DFlash drafter, block size {drafter.block_size}"
    taps = ", ".join(map(str, drafter.target_layer_ids))
    yield "target layers", f"{taps} (from 0; the file counts {drafter.layer_ids_read_as})"


def _family(checkpoint: Checkpoint, problems: list[str]) -> Iterator[Row]:
    """The architecture, and whether it can be built."""
    names = checkpoint.config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "none named"
    if name in FAMILIES:
        yield "family", f"{name}: can be built"
        try:
            options = BuildOptions(checkpoint=checkpoint.directory)
            description = builder.describe_source(options, CheckpointSource(checkpoint), None)
            builder.check_coverage(description, "target", checkpoint)
            yield "coverage", f"all {len(checkpoint.names())} tensors are used"
        except (CheckpointError, NetworkError, OptionError) as error:
            problems.append(str(error))
        return
    if _is_drafter(name, checkpoint.config):
        try:
            drafter = dflash_config.read_drafter(checkpoint)
        except CheckpointError as error:
            problems.append(str(error))
            yield "family", f"{name}: a drafter"
            return
        yield from _drafter(name, drafter)
        return
    yield "family", f"{name}: {_UNSUPPORTED}"


def _layers(config: Mapping[str, Any]) -> Iterator[Row]:
    layers = Layers.of(config)
    if layers is None:
        yield "layers", "config.json does not say"
        return
    yield "layers", ", ".join(f"{n} {kind}" for kind, n in layers.kinds.items())
    if layers.mlps:
        yield "feed-forward", ", ".join(f"{n} {kind}" for kind, n in layers.mlps.items())
    if layers.indexing:
        shared = sum(layers.kinds.values()) - layers.indexing
        yield (
            "indexers",
            f"{layers.indexing} layers choose keys" + (f", {shared} share" if shared else ""),
        )
    if layers.kv_elements:
        in_bf16 = f"{layers.kv_elements} elements, {size_text(2 * layers.kv_elements)} in bf16"
        in_fp8 = f", {size_text(layers.kv_elements)} in FP8"
        yield "KV per token", in_bf16 + ("" if config.get("kv_lora_rank") else in_fp8)
    for name, shape, count in layers.states:
        text = " x ".join(map(str, shape))
        elements = count
        for dim in shape:
            elements *= dim
        yield (
            f"{name} per request",
            f"{count} layers of {text}, {size_text(4 * elements)} in float32",
        )


def _quantization(checkpoint: Checkpoint) -> Iterator[Row]:
    found = checkpoint.quantization
    if found is None:
        yield "quantization", "none"
        return
    yield "quantization", f"{found.algorithm}, {found.layout}'s layout"
    if found.kv_cache:
        scales = [n for n in checkpoint.names() if n.endswith(headers.KV_SCALE_SUFFIXES)]
        yield "KV cache calibrated for", f"{found.kv_cache}, {len(scales)} scales"
    if found.exclusions:
        yield (
            "left alone",
            ", ".join(found.exclusions[:8])
            + (f" and {len(found.exclusions) - 8} more" if len(found.exclusions) > 8 else ""),
        )


def _sizes(checkpoint: Checkpoint) -> Iterator[Row]:
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    total = sum(info.nbytes for info in infos.values())
    files = {info.file for info in infos.values()}
    yield "tensors", f"{len(infos)} in {len(files)} files, {size_text(total)}"
    if infos:
        largest = max(infos, key=lambda name: infos[name].nbytes)
        yield "largest tensor", f"{largest}, {size_text(infos[largest].nbytes)}"
    shares = ", ".join(f"{size_text(total // ranks)} on {ranks}" for ranks in _RANKS)
    yield "weights per GPU, at least", shares  # some are whole on every rank


def _groups(checkpoint: Checkpoint) -> list[Row]:
    """Modules whose names differ in numbers only: how many, how stored, shape and bytes."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    members: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.names():
        module, _, part = name.rpartition(".")
        members[module if part in headers.PARTS + headers.KV_SCALES else name].append(name)
    for module, names in members.items():
        kind, shape = _stored(checkpoint, module)
        key = (_LAYER_OR_EXPERT.sub("*", module), kind, shape)
        counts[key] += 1
        sizes[key] += sum(checkpoint.info(name).nbytes for name in names)
    return [
        (name, str(counts[name, kind, shape]), kind, shape, size_text(sizes[name, kind, shape]))
        for name, kind, shape in sorted(counts)
    ]


def _stored(checkpoint: Checkpoint, module: str) -> tuple[str, str]:
    """How a module is stored, and its shape."""
    info = checkpoint.info(module) if module in checkpoint else None
    if info is None and not checkpoint.has_weight(module):
        return "scales alone", ""
    info = info or checkpoint.weight_info(module)
    shape, kind = info.shape, str(info.dtype).removeprefix("torch.")
    if len(shape) == 2 and module not in checkpoint:
        try:
            linear = checkpoint.linear_info(module)
        except CheckpointError:
            return f"{kind} (see the problems)", str(list(shape))
        shape, kind = (linear.out_features, linear.in_features), linear.algorithm or kind
    return kind, str(list(shape))
