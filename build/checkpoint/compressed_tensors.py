"""``quantization_config`` as compressed-tensors writes it (llm-compressor's checkpoints).

Source of the format: the package's ``QuantizationConfig`` and ``QuantizationArgs``.
"""

import re
from collections.abc import Mapping
from typing import Any

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.patterns import matcher
from trtree.build.checkpoint.scheme import MIXED, QuantizationConfig
from trtree.plugins.nvfp4_linear.format import BLOCK

_FORMATS = ("nvfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_EVERY_LINEAR = "Linear"


def parse(data: Mapping[str, Any], where: str) -> QuantizationConfig:
    """The quantization that the object at ``where`` describes.

    Raises:
        CheckpointError: a scheme, format or transform that is not supported, or a field
            of the wrong type.
    """
    _refuse_unsupported(data, where)
    groups = data.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups must be an object of schemes")
    layers: list[tuple[str, str]] = []
    for name, group in groups.items():
        at = f"{where}: config_groups.{name}"
        if not isinstance(group, dict):
            raise CheckpointError(f"{at} must be an object, not {group!r:.80}")
        algorithm = _algorithm(group, at)
        layers += [(target, algorithm) for target in _targets(group.get("targets"), at)]
    kv_cache = _kv_cache(data.get("kv_cache_scheme"), f"{where}: kv_cache_scheme")
    ignored = _names(data.get("ignore"), f"{where}: ignore")
    every = [algorithm for target, algorithm in layers if target == _EVERY_LINEAR]
    if len(layers) == len(every) == 1:
        return QuantizationConfig(every[0], ignored, kv_cache, where, "compressed-tensors")
    # Named modules come before "every linear", which covers the rest.
    named = [(target, algorithm) for target, algorithm in layers if target != _EVERY_LINEAR]
    rest = [("*", algorithm) for algorithm in every[:1]]
    return QuantizationConfig(
        MIXED, ignored, kv_cache, where, "compressed-tensors", tuple(named + rest)
    )


def _refuse_unsupported(data: Mapping[str, Any], where: str) -> None:
    form = data.get("format")
    if form is not None and form not in _FORMATS:
        raise CheckpointError(
            f"{where}: format {form!r} is not supported; supported: {', '.join(_FORMATS)}"
        )
    status = data.get("quantization_status", "compressed")
    if status != "compressed":
        raise CheckpointError(
            f"{where}: quantization_status is {status!r}, so the weights are not stored in four "
            "bits; save the checkpoint compressed"
        )
    for key in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        if data.get(key):
            raise CheckpointError(f"{where}: {key} {data[key]!r:.80} is not supported")


def _algorithm(group: Mapping[str, Any], where: str) -> str:
    """A scheme by ModelOpt's name."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict) or not isinstance(inputs, dict | None):
        raise CheckpointError(f"{where}: weights must be an object, input_activations one or null")
    if group.get("output_activations"):
        raise CheckpointError(f"{where}: output_activations are not supported")
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    if (bits, kind) == (4, "float") and weights.get("group_size") == BLOCK:
        if inputs is None:
            return "W4A16_NVFP4"
        if (inputs.get("num_bits"), inputs.get("type"), inputs.get("group_size")) == (
            4,
            "float",
            BLOCK,
        ):
            return "NVFP4"
    if (bits, kind) == (8, "float") and strategy in ("tensor", "channel"):
        return "FP8" if strategy == "tensor" else "FP8_PER_CHANNEL_PER_TOKEN"
    raise CheckpointError(
        f"{where}: {bits}-bit {kind} weights (strategy {strategy}, group_size "
        f"{weights.get('group_size')}) with inputs of "
        f"{inputs.get('num_bits') if inputs else 16} bits are not supported; supported: NVFP4 "
        "(4-bit float in groups of 16, inputs alike or 16 bits) and FP8 (per tensor or channel)"
    )


def _targets(value: Any, where: str) -> tuple[str, ...]:
    targets = _names(value, f"{where}.targets")
    for target in targets:
        # A bare word is a class of modules; module names have dots or are heads.
        if target != _EVERY_LINEAR and re.fullmatch(r"[A-Z]\w*", target):
            raise CheckpointError(
                f"{where}: target {target!r} is not supported; supported: {_EVERY_LINEAR}, module "
                "names and 're:' expressions"
            )
    return targets


def _names(value: Any, where: str) -> tuple[str, ...]:
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise CheckpointError(f"{where} must be a list of module names, not {value!r:.80}")
    for name in names:
        try:
            matcher([name])
        except re.error as error:
            raise CheckpointError(f"{where}: {name!r} is no expression: {error}") from None
    return tuple(names)


def _kv_cache(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict) and (value.get("num_bits"), value.get("type")) == (8, "float"):
        return "FP8"
    raise CheckpointError(f"{where} {value!r:.80} is not supported; supported: 8-bit float")
