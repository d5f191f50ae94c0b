"""How a checkpoint says it is quantized: ModelOpt's configuration, read and checked.

ModelOpt writes the same facts twice: ``hf_quant_config.json`` and ``config.json``'s
``quantization_config``. Either is enough; where both are there they must agree.
compressed-tensors has the latter alone, and a vocabulary of its own; see
``compressed_tensors.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtree.build.checkpoint import compressed_tensors
from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.json_file import read_json
from trtree.build.checkpoint.scheme import (
    ALGORITHMS,
    FP8_BLOCK,
    MIXED,
    MODELOPT,
    SVD,
    QuantizationConfig,
    group_sizes,
)

SIDECAR = "hf_quant_config.json"
_PER_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
_KV_CACHES = ("FP8", "NVFP4")

# Algorithms of ModelOpt's exporter that are known but not supported.
_UNSUPPORTED = {
    "FP8_PB_REAL",
    "FP8_PB_WO",
    "MXFP4",
    "MXFP8",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W4A8_MXFP4_FP8",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
}


@dataclass(frozen=True)
class _Facts:
    """One of the two configurations, before it is judged; field names are for messages."""

    quant_algo: str | None
    group_size: int | None
    exclusions: frozenset[str]
    kv_cache: str | None
    layers: tuple[tuple[str, str], ...] = ()  # of MIXED_PRECISION


def read_quantization(directory: Path, config: Mapping[str, Any]) -> QuantizationConfig | None:
    """The quantization of a checkpoint directory whose config.json is ``config``.

    None: a plain checkpoint, every linear dense.

    Raises:
        CheckpointError: the two configurations disagree, or name something unknown or
            not supported.
    """
    found: dict[str, _Facts] = {}
    sidecar = directory / SIDECAR
    if sidecar.exists():
        found[str(sidecar)] = _from_sidecar(read_json(sidecar), str(sidecar))
    inline = config.get("quantization_config")
    if inline:
        where = f"{directory / 'config.json'}: quantization_config"
        if isinstance(inline, dict) and inline.get("quant_method") == "compressed-tensors":
            if found:
                raise CheckpointError(
                    f"{where} is compressed-tensors', {sidecar} is ModelOpt's; remove one"
                )
            return compressed_tensors.parse(inline, where)
        found[where] = _from_inline(inline, where)
    return _judge(_agreed(found), next(iter(found))) if found else None


def _from_sidecar(data: Any, where: str) -> _Facts:
    body = data.get("quantization") if isinstance(data, dict) else None
    if not isinstance(body, dict):
        raise CheckpointError(f"{where}: has no `quantization` object; is it ModelOpt's?")
    return _Facts(
        quant_algo=_name(body.get("quant_algo"), f"{where}: quant_algo"),
        group_size=_group_size(body.get("group_size"), where),
        exclusions=_exclusions(body.get("exclude_modules"), f"{where}: exclude_modules"),
        kv_cache=_name(body.get("kv_cache_quant_algo"), f"{where}: kv_cache_quant_algo"),
        layers=_layers(body.get("quantized_layers"), f"{where}: quantized_layers"),
    )


def _from_inline(data: Any, where: str) -> _Facts:
    if not isinstance(data, dict):
        raise CheckpointError(f"{where} must be an object, not {data!r}")
    if "quantization" in data:  # ModelOpt's drafter exporter puts the sidecar here as it is
        return _from_sidecar(data, where)
    method = data.get("quant_method")
    if method == "fp8":
        return _from_fp8(data, where)
    if method != "modelopt":
        raise CheckpointError(
            f"{where}: quant_method {method!r} is not supported; supported: compressed-tensors, "
            f"fp8 in blocks, and ModelOpt exports of {_supported()}"
        )
    algorithm = _name(data.get("quant_algo"), f"{where}: quant_algo")
    groups = data.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise CheckpointError(f"{where}: config_groups must be an object of objects")
    for name, group in groups.items():
        if not isinstance(group.get("weights"), dict | None):
            raise CheckpointError(
                f"{where}: config_groups.{name}.weights must be an object, not "
                f"{group['weights']!r:.80}"
            )
    if algorithm in ("NVFP4", "W4A16_NVFP4", SVD):
        for name, group in groups.items():
            _check_activations(algorithm, group, f"{where}: config_groups.{name}")
    sizes = {
        _group_size((group.get("weights") or {}).get("group_size"), where)
        for group in groups.values()
    }
    if algorithm == MIXED:
        sizes.clear()  # each layer says its own
    if len(sizes) > 1:
        raise CheckpointError(f"{where}: config_groups name several group sizes: {sizes}")
    return _Facts(
        quant_algo=algorithm,
        group_size=sizes.pop() if sizes else None,
        layers=_layers(data.get("quantized_layers"), f"{where}: quantized_layers"),
        exclusions=_exclusions(data.get("ignore"), f"{where}: ignore"),
        kv_cache=_kv_cache(data.get("kv_cache_scheme"), f"{where}: kv_cache_scheme"),
    )


def _from_fp8(data: Mapping[str, Any], where: str) -> _Facts:
    """transformers' ``FineGrainedFP8Config``; a module's name there covers all below it."""
    expected = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
    for field, value in expected.items():
        found = data.get(field, None if field == "weight_block_size" else value)
        if found != value:
            raise CheckpointError(f"{where}: {field} {found!r} is not supported; only {value!r} is")
    modules = _exclusions(data.get("modules_to_not_convert"), f"{where}: modules_to_not_convert")
    return _Facts(FP8_BLOCK, None, frozenset(f"{name}.*" for name in modules), None)


def _check_activations(algorithm: str, group: Mapping[str, Any], where: str) -> None:
    """A weight-only group under a W4A4 algorithm, or the reverse, would be misread."""
    quantized = group.get("input_activations") is not None
    if quantized != (ALGORITHMS[algorithm].activations == "nvfp4"):
        raise CheckpointError(
            f"{where}: input_activations {group.get('input_activations')!r} contradict "
            f"quant_algo {algorithm!r}; correct quant_algo (NVFP4 or W4A16_NVFP4) or the group"
        )


def _agreed(found: Mapping[str, _Facts]) -> _Facts:
    """The facts of one configuration, or of two that say the same.

    Older exporters write group size and KV-cache algorithm in one place only.
    """
    if len(found) == 1:
        return next(iter(found.values()))
    (a_where, a), (b_where, b) = found.items()
    for field in ("quant_algo", "group_size", "kv_cache"):
        x, y = getattr(a, field), getattr(b, field)
        if x != y and (field == "quant_algo" or None not in (x, y)):
            raise CheckpointError(
                f"{a_where} says {field} {x!r}, {b_where} says {y!r}; correct one of them"
            )
    if a.exclusions != b.exclusions:
        raise CheckpointError(
            f"{a_where} alone excludes {sorted(a.exclusions - b.exclusions)}, {b_where} alone "
            f"{sorted(b.exclusions - a.exclusions)}; correct one of them"
        )
    if a.layers != b.layers and a.layers and b.layers:
        differing = sorted({name for name, _ in set(a.layers) ^ set(b.layers)})
        raise CheckpointError(
            f"{a_where} and {b_where}: quantized_layers differ in {differing}; correct one of them"
        )
    return replace(
        a,
        layers=a.layers or b.layers,
        group_size=a.group_size or b.group_size,
        kv_cache=a.kv_cache or b.kv_cache,
    )


def _judge(facts: _Facts, where: str) -> QuantizationConfig | None:
    algorithm = facts.quant_algo
    if algorithm is None:
        return None
    if algorithm == MIXED and not facts.layers:
        raise CheckpointError(
            f"{where}: {MIXED} without quantized_layers says nothing; export again"
        )
    for name in (algorithm, *(layer for _, layer in facts.layers)):
        if name not in ALGORITHMS and name != MIXED:
            known = "not supported yet" if name in _UNSUPPORTED else "unknown"
            raise CheckpointError(
                f"{where}: quantization algorithm {name!r} is {known}; supported: {_supported()}"
            )
    sizes = group_sizes(algorithm)
    if facts.group_size not in (None, *sizes) and algorithm not in ("FP8", _PER_CHANNEL):
        raise CheckpointError(
            f"{where}: group_size {facts.group_size} is not supported for {algorithm}; "
            f"only {' or '.join(map(str, sizes))} is"
        )
    if facts.kv_cache not in (None, *_KV_CACHES):
        raise CheckpointError(
            f"{where}: KV-cache quantization {facts.kv_cache!r} is not supported; supported: "
            f"{', '.join(_KV_CACHES)}"
        )
    return QuantizationConfig(
        algorithm,
        tuple(sorted(facts.exclusions)),
        facts.kv_cache,
        where,
        layers=facts.layers if algorithm == MIXED else (),
    )


def _supported() -> str:
    return ", ".join((*MODELOPT, MIXED))


def _layers(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Module -> algorithm, sorted."""
    layers = {} if value is None else value
    if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
        raise CheckpointError(f"{where} must be an object of objects, not {value!r:.80}")
    found = []
    for module, entry in layers.items():
        algorithm = _name(entry.get("quant_algo"), f"{where}.{module}.quant_algo")
        size = _group_size(entry.get("group_size"), f"{where}.{module}")
        if algorithm is None:
            raise CheckpointError(f"{where}.{module} names no quant_algo")
        if size not in (None, *group_sizes(algorithm)) and "NVFP4" in algorithm:
            raise CheckpointError(f"{where}.{module}: group_size {size} is not supported")
        found.append((module, algorithm))
    return tuple(sorted(found))


def _name(value: Any, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{where} must be a name or null, not {value!r}")
    return value or None


def _group_size(value: Any, where: str) -> int | None:
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{where}: group_size must be an integer, not {value!r}")
    return value


def _kv_cache(value: Any, where: str) -> str | None:
    """``kv_cache_scheme``: a name, or for FP8 its description."""
    if isinstance(value, dict):
        if value.get("type") == "float" and value.get("num_bits") == 8:
            return "FP8"
        raise CheckpointError(f"{where} {value!r} is not known; known: 8-bit float, or a name")
    return _name(value, where)


def _exclusions(value: Any, where: str) -> frozenset[str]:
    patterns = [] if value is None else value
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise CheckpointError(f"{where} must be a list of module names, not {value!r}")
    for pattern in patterns:
        if pattern.endswith("."):
            raise CheckpointError(
                f"{where}: {pattern!r} ends in a dot and matches no module; "
                f"write {pattern[:-1]!r} or '{pattern}*'"
            )
        if pattern.startswith("re:"):
            raise CheckpointError(
                f"{where}: {pattern!r} is a regular expression; only names and '*' are supported"
            )
    return frozenset(patterns)
