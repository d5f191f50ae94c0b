"""Rotary position embedding: from a checkpoint's ``rope_parameters`` to frequencies.

Frequencies are computed once, at build time; the graph carries the numbers, so that
every lowering turns by the same angles.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtree.build.network.network import NetworkError


@dataclass(frozen=True)
class RopeTable:
    """angle(position, i) = position * inv_freq[i]; cos and sin are multiplied by scaling.

    Pairs are (x[i], x[i + n]) with n = len(inv_freq), or (x[2i], x[2i + 1]) if interleaved.
    """

    name: str
    inv_freq: tuple[float, ...]
    scaling: float = 1.0
    interleaved: bool = False


def rope_table(
    name: str,
    config: Mapping[str, Any],
    head_dim: int,
    *,
    partial: float | None = None,
    interleaved: bool = False,
) -> RopeTable:
    """Read the rotary parameters of a Hugging Face config.

    Newer files hold ``rope_parameters``; older ones ``rope_theta`` and ``rope_scaling``.
    ``partial`` is the family's default ``partial_rotary_factor``, the part of a head that
    turns; None: the family knows no such parameter, and heads turn whole.

    Raises:
        NetworkError: an unknown rope_type, or a missing or invalid parameter.
    """
    params = rope_parameters(config)
    if params.get("rope_theta") is None:
        theta = config.get("rope_theta")
        params["rope_theta"] = 10000.0 if theta is None else theta
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise NetworkError(
            f"config.json: rope_type {kind!r} is not supported; known: {', '.join(_KINDS)}"
        )
    rotary_dim = _rotary_dim(params, config, head_dim, partial)
    theta = _number(params, "rope_theta")
    base = [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    try:
        inv_freq, scaling = _KINDS[kind](params, config, base, rotary_dim)
        finite = all(math.isfinite(value) for value in (*inv_freq, scaling))
    except NetworkError:
        raise
    except (ArithmeticError, ValueError):  # each number is valid, together they are not
        finite = False
    if not finite:
        raise NetworkError(f"config.json: rope parameters {params!r} give no finite frequencies")
    return RopeTable(name, tuple(inv_freq), scaling, interleaved)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling`` and ``rope_parameters`` of config.json, together.

    Raises:
        NetworkError: one is no object.
    """
    return _mapping(config, "rope_scaling") | _mapping(config, "rope_parameters")


def _rotary_dim(
    params: Mapping[str, Any], config: Mapping[str, Any], head_dim: int, partial: float | None
) -> int:
    """head_dim * partial_rotary_factor, which newer files keep among the rope parameters."""
    for where in (params, config):
        factor = where.get("partial_rotary_factor")
        if factor is None:
            continue
        if partial is None and factor != 1:
            raise NetworkError(
                f"config.json: partial_rotary_factor {factor!r} is not supported; only 1 is"
            )
        partial = _number(where, "partial_rotary_factor")
        break
    rotary_dim = int(head_dim * (partial or 1.0))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise NetworkError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} leaves "
            f"{rotary_dim} rotary dimensions; an even number up to head_dim is needed"
        )
    return rotary_dim


_Scaled = tuple[list[float], float]


def _default(
    params: Mapping[str, Any], config: Mapping[str, Any], base: list[float], dim: int
) -> _Scaled:
    return base, 1.0


def _linear(
    params: Mapping[str, Any], config: Mapping[str, Any], base: list[float], dim: int
) -> _Scaled:
    factor = _number(params, "factor")
    return [f / factor for f in base], 1.0


def _llama3(
    params: Mapping[str, Any], config: Mapping[str, Any], base: list[float], dim: int
) -> _Scaled:
    """Slow down wavelengths above the trained context, blend in between (Llama 3.1)."""
    factor, low, high = (
        _number(params, key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = _number(params, "original_max_position_embeddings")
    if high <= low:
        raise NetworkError(
            f"config.json: high_freq_factor {high} must be above low_freq_factor {low}"
        )
    scaled = []
    for freq in base:
        wavelength = 2 * math.pi / freq
        if wavelength < context / high:
            scaled.append(freq)
        elif wavelength > context / low:
            scaled.append(freq / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * freq / factor + smooth * freq)
    return scaled, 1.0


def _yarn(
    params: Mapping[str, Any], config: Mapping[str, Any], base: list[float], dim: int
) -> _Scaled:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate slow frequencies, keep fast ones."""
    if params.get("original_max_position_embeddings") is not None:
        context = _number(params, "original_max_position_embeddings")
    else:
        context = _number(config, "max_position_embeddings")
    factor = _number(params, "factor")
    theta = _number(params, "rope_theta")
    if theta <= 1:
        raise NetworkError(f"config.json: yarn needs a rope_theta above 1, not {theta}")
    beta_fast = _number(params, "beta_fast", 32)
    beta_slow = _number(params, "beta_slow", 1)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    inv_freq = []
    for i, freq in enumerate(base):
        interpolated = min(max((i - low) / width, 0.0), 1.0)
        inv_freq.append(freq / factor * interpolated + freq * (1 - interpolated))
    return inv_freq, _yarn_attention_factor(params, factor)


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return _number(params, "attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(_number(params, "mscale")) / mscale(_number(params, "mscale_all_dim"))
    return mscale(1.0)


_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], list[float], int], _Scaled]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def positive_number(where: str, key: str, value: Any) -> float:
    """``value`` as a float.

    Raises:
        NetworkError: it is no number, not finite (JSON readers take Infinity and NaN),
            or not positive.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # The bound also refuses integers that no float holds.
    if not number or not 0 < value <= sys.float_info.max:
        raise NetworkError(f"{where}: {key} must be a positive number, not {value!r}")
    return float(value)


def _number(params: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = params.get(key)
    return positive_number("config.json", key, default if value is None else value)


def _mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NetworkError(f"config.json: {key} must be an object, not {value!r}")
    return dict(value)
