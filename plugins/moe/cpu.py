"""The CPU kernels of experts, from Python: calls for tests and tools.

The engine calls the same functions from C++ (`moe.hpp`); README.md defines the arithmetic.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

import trtree._core as _core
from trtree.plugins.dense_linear import cpu as dense_cpu
from trtree.plugins.moe.contract import Routing
from trtree.plugins.nvfp4_linear import cpu as nvfp4_cpu
from trtree.plugins.nvfp4_linear.format import QuantizedTensor

FloatArray = npt.NDArray[np.float32]

_SERIAL = _core.Serial()


def route(
    logits: FloatArray,
    routing: Routing,
    correction_bias: FloatArray | None = None,
    *,
    parallel: _core.Parallel = _SERIAL,
) -> FloatArray:
    """logits float32 [rows, experts] -> weights float32 [rows, experts], 0 where not chosen.

    Raises:
        ValueError: shapes do not fit the routing.
    """
    if logits.shape[1] != routing.experts:
        raise ValueError(f"logits of {logits.shape[1]} experts, routing of {routing.experts}")
    weights: FloatArray = _core.moe.route(
        logits,
        correction_bias,
        routing.top_k,
        routing.scores == "sigmoid",
        routing.normalize,
        routing.scale,
        routing.groups,
        routing.top_groups,
        parallel,
    )
    return weights


def pack_nvfp4(
    weights: Sequence[QuantizedTensor],
    input_scale: float | None,
    *,
    segment_bounds: Sequence[int] | None = None,
) -> _core.moe.Experts:
    """The NVFP4 linear [O, K] of each expert; input_scale: None for bf16 activations."""
    packed = _aligned(np.concatenate([nvfp4_cpu.pack(weight) for weight in weights]))
    rows, half_k = weights[0].codes.shape
    scales = np.array([float(weight.global_scale) for weight in weights], dtype=np.float32)
    bounds = None if segment_bounds is None else list(segment_bounds)
    return _core.moe.nvfp4_experts(packed, rows, 2 * half_k, scales, input_scale, bounds)


def pack_dense(
    weights: Sequence[torch.Tensor], *, segment_bounds: Sequence[int] | None = None
) -> _core.moe.Experts:
    """The dense linear [O, K] of each expert."""
    packed = _aligned(np.concatenate([dense_cpu.pack(weight) for weight in weights]))
    dtype = str(weights[0].dtype).removeprefix("torch.")
    bounds = None if segment_bounds is None else list(segment_bounds)
    rows, k = weights[0].shape
    return _core.moe.dense_experts(packed, dtype, len(weights), rows, k, bounds)


def experts_scale(
    x: FloatArray,
    weights: FloatArray,
    vectors: FloatArray,
    slots: int,
    *,
    parallel: _core.Parallel = _SERIAL,
) -> FloatArray:
    """x [rows, K] or [rows, slots, K] times the vectors [experts, K] of each row's experts
    -> [rows, slots, K].

    Raises:
        ValueError: shapes do not fit, or a row has more experts than slots.
    """
    y: FloatArray = _core.moe.scale(x, weights, vectors, slots, parallel)
    return y


def experts_linear(
    experts: _core.moe.Experts,
    x: FloatArray,
    weights: FloatArray,
    slots: int,
    *,
    partial_sums: bool = False,
    parallel: _core.Parallel = _SERIAL,
    isa: str = "",
) -> FloatArray:
    """x [rows, K] or [rows, slots, K], weights [rows, experts] -> [rows * slots, O] by each
    slot's expert, or the segments' sums [rows * slots, segments, O].

    Raises:
        ValueError: shapes do not fit, or a row has more experts than slots.
    """
    y: FloatArray = _core.moe.linear(experts, x, weights, slots, partial_sums, parallel, isa)
    return y


def experts_up(
    experts: _core.moe.Experts,
    x: FloatArray,
    weights: FloatArray,
    slots: int,
    added: FloatArray | None = None,
    *,
    parallel: _core.Parallel = _SERIAL,
    isa: str = "",
) -> FloatArray:
    """x [rows, K] or [rows, slots, K], weights [rows, experts] -> silu(gate) * up [rows, slots, I].

    ``added`` [rows, slots, 2 I] is added to gate and up first.

    Raises:
        ValueError: shapes do not fit, or a row has more experts than slots.
    """
    h: FloatArray = _core.moe.up(experts, x, weights, slots, added, parallel, isa)
    return h


def experts_down(
    experts: _core.moe.Experts,
    h: FloatArray,
    weights: FloatArray,
    *,
    partial_sums: bool = False,
    parallel: _core.Parallel = _SERIAL,
    isa: str = "",
) -> FloatArray:
    """h [rows, slots, I] -> [rows, O], or the segments' sums [rows, segments, O].

    Raises:
        ValueError: shapes do not fit, or a row has more experts than slots.
    """
    y: FloatArray = _core.moe.down(experts, h, weights, partial_sums, parallel, isa)
    return y


def _aligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same bytes at a multiple of 64, as packed weights have to be."""
    room = dense_cpu.aligned(len(data))
    room[:] = data
    return room
