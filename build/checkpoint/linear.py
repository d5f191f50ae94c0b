"""Linear modules of a checkpoint, read: dense or NVFP4, fused or alone.

FP8 weights are widened to dense ones in their scale's dtype, as both exporters'
libraries do it; see ``headers.py`` for what is refused before that.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.headers import (
    BLOCK_ROWS,
    BLOCK_SCALE,
    FP8,
    LOW_RANK,
    NAMES,
    PRE_QUANT_SCALE,
    LinearInfo,
    Names,
    dense_name,
)
from trtree.build.checkpoint.matrix import HeldMatrix, Matrix
from trtree.build.checkpoint.scheme import FP8_BLOCK, QuantizationConfig
from trtree.build.checkpoint.shard import TensorInfo
from trtree.plugins.nvfp4_linear import format as nvfp4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Smoothing:
    """What a quantized weight leaves to others: its linear is (W + B A) times ``vector``.

    vector: [in_features]. factors: A [rank, in_features] and B [out_features, rank], or None.
    """

    vector: torch.Tensor
    factors: tuple[torch.Tensor, torch.Tensor] | None

    def rows(self, rows: torch.Tensor) -> "Smoothing":
        """Of some of the weight's rows, int64 [n]."""
        return replace(self, factors=self.factors and (self.factors[0], self.factors[1][rows]))

    def whole(self, weight: torch.Tensor) -> torch.Tensor:
        """The linear of one weight W float32, which takes its input as it is."""
        if self.factors is not None:
            a, b = self.factors
            weight = weight + b.float() @ a.float()
        return weight * self.vector.float()


@dataclass(frozen=True)
class LinearWeight:
    """One linear, or several fused along out_features.

    weight: [out_features, in_features] dense, or quantized. input_scale: float32
    scalar where the checkpoint holds one. bias: [out_features] or None. segment_bounds:
    where K is cut into segments, in blocks of 16; None for the even cut. smoothing: of an
    NVFP4 weight whose input is scaled.
    """

    kind: Literal["dense", "nvfp4"]
    weight: torch.Tensor | nvfp4.QuantizedTensor
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    segment_bounds: tuple[int, ...] | None = None
    smoothing: Smoothing | None = None


@dataclass(frozen=True)
class StoredLinear:
    """A linear in parts along out_features, as they are stored and not read yet: whoever reads
    them checks their numbers, and what is at fault ``Checkpoint.linear`` says.

    codes, block_scales: of an NVFP4 linear's parts; or else dense, of one dtype.
    global_scale: of the codes, or what dense parts are to be rounded to NVFP4 with; None for a
    linear that stays dense. The others: as of ``LinearWeight``.
    """

    codes: tuple[Matrix, ...]
    block_scales: tuple[Matrix, ...]
    dense: tuple[Matrix, ...]
    global_scale: float | None
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    segment_bounds: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[O, K]."""
        parts = self.codes or self.dense
        k = parts[0].shape[1] * (2 if self.codes else 1)
        return sum(part.shape[0] for part in parts), k

    @classmethod
    def of(cls, linear: LinearWeight) -> "StoredLinear":
        """A linear that has been read, in one part."""
        rest = (linear.input_scale, linear.bias, linear.segment_bounds)
        if isinstance(linear.weight, nvfp4.QuantizedTensor):
            codes, scales, global_scale = linear.weight
            return cls((HeldMatrix(codes),), (HeldMatrix(scales),), (), float(global_scale), *rest)
        return cls((), (), (HeldMatrix(linear.weight),), None, *rest)


class Tensors(Protocol):
    """Where tensors come from: a Checkpoint. ``stored`` and ``number`` check no values."""

    quantization: QuantizationConfig | None

    def tensor(self, tensor_name: str) -> torch.Tensor: ...
    def stored(self, tensor_name: str) -> Matrix: ...
    def number(self, tensor_name: str) -> float: ...
    def info(self, tensor_name: str) -> TensorInfo: ...
    def linear_info(self, module: str) -> LinearInfo: ...
    def __contains__(self, tensor_name: object) -> bool: ...


def load(checkpoint: Tensors, modules: Sequence[str]) -> LinearWeight:
    """The modules' weights, concatenated along out_features.

    NVFP4 linears of one ``weight_scale_2`` concatenate exactly; others are rescaled to
    the largest, which rounds their block scales to e4m3 again and is logged.

    Raises:
        CheckpointError: the modules cannot be fused, or a value is not finite or, for
            a scale, not positive.
    """
    check_fusable(checkpoint, modules)
    kind = checkpoint.linear_info(modules[0]).kind
    bias = load_bias(checkpoint, modules)
    if kind == "dense":
        weights = [_load_dense(checkpoint, module) for module in modules]
        return LinearWeight(kind, _concatenate(weights), None, bias)
    parts = [_load_nvfp4(checkpoint, module) for module in modules]
    return LinearWeight(
        kind,
        _fuse(modules, parts),
        _input_scale(checkpoint, modules),
        bias,
        smoothing=_smoothing(checkpoint, modules),
    )


def _smoothing(checkpoint: Tensors, modules: Sequence[str]) -> Smoothing | None:
    info = checkpoint.linear_info(modules[0])
    if not info.has_pre_quant_scale:
        return None
    factors = None
    if info.rank:
        first, second = LOW_RANK
        a = checkpoint.tensor(f"{modules[0]}.{first}")
        factors = a, _concatenate([checkpoint.tensor(f"{m}.{second}") for m in modules])
    return Smoothing(input_vector(checkpoint, f"{modules[0]}.{PRE_QUANT_SCALE}"), factors)


def stored(checkpoint: Tensors, modules: Sequence[str]) -> StoredLinear:
    """The same linear, its large tensors unread: but for FP8 ones, which are widened, and the
    block scales of NVFP4 linears of several ``weight_scale_2`` or of groups larger than 16.

    Raises:
        CheckpointError: the modules cannot be fused, or a value that was read is at fault.
    """
    check_fusable(checkpoint, modules)
    bias = load_bias(checkpoint, modules)
    if checkpoint.linear_info(modules[0]).kind == "dense":
        weights = tuple(_stored_dense(checkpoint, module) for module in modules)
        return StoredLinear((), (), weights, None, None, bias)
    names = _names(checkpoint)
    input_scale = _input_scale(checkpoint, modules)
    scales = [_global_number(checkpoint, f"{m}.{names.global_scale}") for m in modules]
    codes = tuple(checkpoint.stored(f"{module}.{names.codes}") for module in modules)
    block_scales: tuple[Matrix, ...]
    uneven = len(set(scales)) > 1
    if uneven or any(_blocks_per_scale(checkpoint, module) > 1 for module in modules):
        parts = _rescaled(modules, [_load_nvfp4(checkpoint, module) for module in modules])
        block_scales = tuple(HeldMatrix(part.block_scale) for part in parts)
        largest = float(parts[0].global_scale)
    else:
        block_scales = tuple(checkpoint.stored(f"{m}.{names.block_scale}") for m in modules)
        largest = scales[0]
    return StoredLinear(codes, block_scales, (), largest, input_scale, bias)


def _input_scale(checkpoint: Tensors, modules: Sequence[str]) -> torch.Tensor | None:
    names = [f"{module}.{_names(checkpoint).input_scale}" for module in modules]
    if not all(name in checkpoint for name in names):
        return None
    return torch.tensor(max(_global_number(checkpoint, name) for name in names))


def _stored_dense(checkpoint: Tensors, module: str) -> Matrix:
    name = dense_name(module)
    if checkpoint.info(name).dtype == FP8:
        return HeldMatrix(_load_dense(checkpoint, module))
    return checkpoint.stored(name)


def load_bias(checkpoint: Tensors, modules: Sequence[str]) -> torch.Tensor | None:
    """The biases of fusable modules, concatenated; None if they have none."""
    names = [f"{module}.bias" for module in modules]
    biases = [checkpoint.tensor(name) for name in names if name in checkpoint]
    return _concatenate(biases) if biases else None


def check_fusable(checkpoint: Tensors, modules: Sequence[str]) -> None:
    """Whether the modules can be one linear.

    Raises:
        CheckpointError: naming two that differ, and in what.
    """
    if not modules:
        raise ValueError("no modules to load")
    first = checkpoint.linear_info(modules[0])
    for module in modules[1:]:
        info = checkpoint.linear_info(module)
        for field in ("kind", "dtype", "in_features", "has_bias", "has_pre_quant_scale", "rank"):
            ours, theirs = getattr(first, field), getattr(info, field)
            if ours != theirs:
                raise CheckpointError(
                    f"cannot fuse {modules[0]} and {module}: {field} {ours} and {theirs}"
                )
        shared = [LOW_RANK[0]] if first.rank else []
        shared += [PRE_QUANT_SCALE] if first.has_pre_quant_scale else []
        for part in shared:
            ours, theirs = (checkpoint.tensor(f"{m}.{part}") for m in (modules[0], module))
            if not torch.equal(ours, theirs):
                raise CheckpointError(
                    f"cannot fuse {modules[0]} and {module}: each has its own {part}"
                )


def _names(checkpoint: Tensors) -> Names:
    layout = checkpoint.quantization.layout if checkpoint.quantization else "modelopt"
    return NAMES[layout]


def _load_dense(checkpoint: Tensors, module: str) -> torch.Tensor:
    """A plain weight, or an FP8 one times its scale (one number, one per row, or per block)."""
    weight = checkpoint.tensor(dense_name(module))
    if weight.dtype != FP8:
        return weight
    in_blocks = checkpoint.linear_info(module).algorithm == FP8_BLOCK
    name = f"{module}.{BLOCK_SCALE if in_blocks else 'weight_scale'}"
    scale = checkpoint.tensor(name)
    if not bool((scale > 0).all()):
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name} has values that are not positive "
            f"(the least: {scale.min().item()}); export again"
        )
    return (
        _scale_blocks(weight, scale) if in_blocks else weight.to(scale.dtype) * scale.reshape(-1, 1)
    )


def _scale_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[O, K] float32; the last blocks of either axis may be narrower."""
    wide = weight.float()
    for rows, scales in zip(torch.split(wide, BLOCK_ROWS), scale.float(), strict=True):
        rows *= scales.repeat_interleave(BLOCK_ROWS)[: weight.shape[1]]
    return wide


def _load_nvfp4(checkpoint: Tensors, module: str) -> nvfp4.QuantizedTensor:
    names = _names(checkpoint)
    global_scale = _global_scale(checkpoint, f"{module}.{names.global_scale}")
    name = f"{module}.{names.block_scale}"
    block_scale = checkpoint.tensor(name)
    raw = block_scale.view(torch.uint8)
    if raw.numel() and raw.max() > 0x80 and (negative := int((raw > 0x80).sum())):
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name} has {negative} negative block scales "
            f"of {raw.numel()} (first: {block_scale[raw > 0x80][0].item()}); export again"
        )
    codes = checkpoint.tensor(f"{module}.{names.codes}")
    if (blocks := _blocks_per_scale(checkpoint, module)) > 1:
        block_scale = raw.repeat_interleave(blocks, dim=1).view(FP8)
    return nvfp4.QuantizedTensor(codes, block_scale, global_scale)


def _blocks_per_scale(checkpoint: Tensors, module: str) -> int:
    """How many blocks of 16 share a stored scale."""
    names = _names(checkpoint)
    columns = 2 * checkpoint.info(f"{module}.{names.codes}").shape[1]
    return columns // (nvfp4.BLOCK * checkpoint.info(f"{module}.{names.block_scale}").shape[1])


def _global_scale(checkpoint: Tensors, name: str) -> torch.Tensor:
    """A scalar to multiply by. A reciprocal is float64: multiplying a block scale by it and
    rounding to float32 then gives what dividing by the stored number gives."""
    dtype = torch.float64 if _names(checkpoint).reciprocal else torch.float32
    return torch.tensor(_global_number(checkpoint, name), dtype=dtype)


def _global_number(checkpoint: Tensors, name: str) -> float:
    value = _positive_number(checkpoint, name)
    return 1 / value if _names(checkpoint).reciprocal else value


def positive_scalar(checkpoint: Tensors, name: str) -> torch.Tensor:
    """A positive, finite scalar, stored as [] or [1].

    Raises:
        CheckpointError: it is neither.
    """
    return torch.tensor(_positive_number(checkpoint, name))


def _positive_number(checkpoint: Tensors, name: str) -> float:
    value = checkpoint.number(name)
    if not 0 < value < math.inf:
        checkpoint.tensor(name)  # names what is not finite
        hint = (
            "; an all-zero tensor exports so, with NaN block scales: exclude the module from "
            "quantization"
            if value == 0 and name.endswith(("weight_scale_2", "weight_global_scale"))
            else "; export again"
        )
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name} is {value}, expected a positive "
            f"number{hint}"
        )
    return value


def input_vector(checkpoint: Tensors, name: str) -> torch.Tensor:
    """The tensor ``name``, which a module's input is multiplied by first [in_features].

    Raises:
        CheckpointError: a value is not a positive number.
    """
    vector = checkpoint.tensor(name)
    if not bool((vector > 0).all()):
        at = int((vector <= 0).nonzero()[0])
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name} has {vector[at].item()} at {at}, "
            "expected positive numbers; export again"
        )
    return vector


def _fuse(modules: Sequence[str], parts: Sequence[nvfp4.QuantizedTensor]) -> nvfp4.QuantizedTensor:
    scaled = _rescaled(modules, parts)
    return nvfp4.QuantizedTensor(
        _concatenate([part.codes for part in scaled]),
        _concatenate([part.block_scale for part in scaled]),
        scaled[0].global_scale,
    )


def _rescaled(
    modules: Sequence[str], parts: Sequence[nvfp4.QuantizedTensor]
) -> list[nvfp4.QuantizedTensor]:
    """All under the largest of their global scales."""
    largest = torch.stack([part.global_scale for part in parts]).max()
    scaled = []
    for module, part in zip(modules, parts, strict=True):
        if part.global_scale != largest:
            _log.warning(
                "%s: weight_scale_2 %g rescaled to %g, the largest of %s; block scales are "
                "rounded again",
                module,
                part.global_scale.item(),
                largest.item(),
                " + ".join(modules),
            )
            part = nvfp4.rescale(part, largest)
        scaled.append(part)
    return scaled


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
