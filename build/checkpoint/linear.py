"""Linear modules of a checkpoint: what kind each is, and its weights, fused or alone.

A dense linear is one float tensor; an NVFP4 linear is ModelOpt's four. Which one a
module is, the configuration and the stored dtype say together: where they differ, the
checkpoint is refused.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.quantization import QuantizationConfig
from trtree.build.checkpoint.shard import TensorInfo
from trtree.plugins.nvfp4_linear import format as nvfp4

_log = logging.getLogger(__name__)

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tensors that only quantized linears have; a linear owns these, its weight and its bias.
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
PARTS = ("weight", "bias", *SCALES)
# Left by algorithms that change the arithmetic: never to be dropped silently.
_FOREIGN = ("pre_quant_scale", "weight_packed", "weight_scale_inv", "qweight")


@dataclass(frozen=True)
class LinearInfo:
    """A linear as headers describe it; dtype is that of the stored ``weight`` tensor."""

    kind: Literal["dense", "nvfp4"]
    out_features: int
    in_features: int
    has_bias: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class LinearWeight:
    """One linear, or several fused along out_features.

    weight: [out_features, in_features] dense, or quantized. input_scale: float32
    scalar where the checkpoint holds one. bias: [out_features] or None. segment_bounds:
    where K is cut into segments, in blocks of 16; None for the even cut.
    """

    kind: Literal["dense", "nvfp4"]
    weight: torch.Tensor | nvfp4.QuantizedTensor
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    segment_bounds: tuple[int, ...] | None = None


class Tensors(Protocol):
    """Where checked tensors come from: a Checkpoint."""

    def tensor(self, tensor_name: str) -> torch.Tensor: ...
    def info(self, tensor_name: str) -> TensorInfo: ...
    def linear_info(self, module: str) -> LinearInfo: ...
    def __contains__(self, tensor_name: object) -> bool: ...


# From headers


def describe(
    tensors: Mapping[str, TensorInfo],
    quantization: QuantizationConfig | None,
    module: str,
) -> LinearInfo:
    """What ``module`` is, from headers and configuration alone.

    Raises:
        CheckpointError: it has no weight, its parts are missing or of the wrong shape
            or dtype, or the configuration says otherwise.
    """
    weight = tensors.get(f"{module}.weight")
    for part in _FOREIGN:
        if (extra := tensors.get(f"{module}.{part}")) is not None:
            raise CheckpointError(
                f"{extra.file}: tensor {module}.{part} belongs to a quantization that is not "
                "supported; supported: ModelOpt NVFP4 and W4A16_NVFP4"
            )
    if weight is None:
        raise CheckpointError(f"the checkpoint has no tensor {module}.weight")
    _check_kind(weight, quantization, module)
    if weight.dtype == torch.uint8 and quantization is not None:
        info = _describe_nvfp4(tensors, quantization, module, weight)
    else:
        info = _describe_dense(tensors, module, weight)
    if (bias := tensors.get(f"{module}.bias")) is not None:
        _expect(f"{module}.bias", bias, [(info.out_features,)], DENSE_DTYPES)
    return info


def check_quantized_modules(
    tensors: Mapping[str, TensorInfo], quantization: QuantizationConfig | None
) -> None:
    """Describe every module that holds a quantized tensor, and every expert.

    A family asks only for the modules it knows; this finds the others' faults too.

    Raises:
        CheckpointError: as ``describe``, for the first module at fault.
    """
    described = set()
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        expert = ".experts." in name
        quantized = part in SCALES or (part == "weight" and info.dtype == torch.uint8)
        if quantized or (expert and part == "weight" and len(info.shape) == 2):
            if module not in described:
                described.add(module)
                describe(tensors, quantization, module)
        elif expert and len(info.shape) > 2 and quantization is not None:
            _check_fused_experts(name, info, quantization)


def _check_kind(weight: TensorInfo, quantization: QuantizationConfig | None, module: str) -> None:
    """The stored dtype against what the configuration says of the module."""
    where = f"{weight.file}: tensor {module}.weight is {_dtype(weight)}"
    if weight.dtype == torch.uint8:
        if quantization is None:
            raise CheckpointError(
                f"{where}, but the checkpoint has no quantization config; add the exporter's "
                "hf_quant_config.json"
            )
        if quantization.is_excluded(module):
            raise CheckpointError(
                f"{where}, but {quantization.source} excludes {module} from quantization; "
                "correct the exclusions, or export again"
            )
    elif weight.dtype not in DENSE_DTYPES:
        raise CheckpointError(f"{where}; supported: {_dtypes(DENSE_DTYPES)}, and NVFP4 as uint8")
    elif quantization is not None and not (
        quantization.is_excluded(module) or _is_embedding(module)
    ):
        raise CheckpointError(
            f"{where}, but {quantization.source} says that {module} is "
            f"{quantization.algorithm}; it was left unquantized: list it in the exclusions, or "
            "export again"
        )


def _check_fused_experts(name: str, info: TensorInfo, quantization: QuantizationConfig) -> None:
    module = name.rpartition(".")[0]
    if info.dtype in DENSE_DTYPES and not (
        quantization.is_excluded(name) or quantization.is_excluded(module)
    ):
        raise CheckpointError(
            f"{info.file}: tensor {name} holds fused experts {list(info.shape)} in "
            f"{_dtype(info)}, but {quantization.source} says that they are "
            f"{quantization.algorithm}; they were left unquantized: list {module!r} in the "
            "exclusions, or export again"
        )


def _describe_dense(
    tensors: Mapping[str, TensorInfo], module: str, weight: TensorInfo
) -> LinearInfo:
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.file}: tensor {module}.weight has shape {list(weight.shape)}, expected "
            "[out_features, in_features]"
        )
    for part in SCALES:
        if f"{module}.{part}" in tensors:
            raise CheckpointError(
                f"{weight.file}: tensor {module}.weight is {_dtype(weight)}, but {module}.{part} "
                "is there as well; the export is inconsistent: export again"
            )
    has_bias = f"{module}.bias" in tensors
    return LinearInfo("dense", *weight.shape, has_bias, weight.dtype)


def _describe_nvfp4(
    tensors: Mapping[str, TensorInfo],
    quantization: QuantizationConfig,
    module: str,
    weight: TensorInfo,
) -> LinearInfo:
    needed = SCALES if quantization.activations == "nvfp4" else SCALES[:2]
    for part in needed:
        if f"{module}.{part}" not in tensors:
            raise CheckpointError(
                f"{weight.file}: {module} is {quantization.algorithm} but has no tensor "
                f"{module}.{part}; export again"
            )
    if len(weight.shape) != 2 or weight.shape[1] * 2 % nvfp4.BLOCK:
        raise CheckpointError(
            f"{weight.file}: tensor {module}.weight has shape {list(weight.shape)}, expected "
            f"[out_features, in_features / 2] with in_features a multiple of {nvfp4.BLOCK}"
        )
    rows, columns = weight.shape[0], weight.shape[1] * 2
    blocks = (rows, columns // nvfp4.BLOCK)
    scale = f"{module}.weight_scale"
    _expect(scale, tensors[scale], [blocks], (torch.float8_e4m3fn,))
    for part in SCALES[1:]:
        if (info := tensors.get(f"{module}.{part}")) is not None:
            _expect(f"{module}.{part}", info, [(), (1,)], (torch.float32,))
    return LinearInfo("nvfp4", rows, columns, f"{module}.bias" in tensors, weight.dtype)


def _expect(
    name: str,
    info: TensorInfo,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> None:
    if info.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{info.file}: tensor {name} has shape {list(info.shape)}, expected {expected}"
        )
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{info.file}: tensor {name} is {_dtype(info)}, expected {_dtypes(dtypes)}"
        )


def _is_embedding(module: str) -> bool:
    """Embeddings are no linears: exporters quantize none and may not list them."""
    leaf = module.rpartition(".")[2]
    return leaf.startswith("embed") or leaf in ("word_embeddings", "wte")


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


# From tensor bytes


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
        weights = [checkpoint.tensor(f"{module}.weight") for module in modules]
        return LinearWeight(kind, _concatenate(weights), None, bias)
    names = [f"{module}.input_scale" for module in modules]
    input_scale = None
    if all(name in checkpoint for name in names):
        input_scale = torch.stack([_scalar(checkpoint, name) for name in names]).max()
    parts = [_load_nvfp4(checkpoint, module) for module in modules]
    return LinearWeight(kind, _fuse(modules, parts), input_scale, bias)


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
        for field in ("kind", "dtype", "in_features", "has_bias"):
            ours, theirs = getattr(first, field), getattr(info, field)
            if ours != theirs:
                raise CheckpointError(
                    f"cannot fuse {modules[0]} and {module}: {field} {ours} and {theirs}"
                )


def _load_nvfp4(checkpoint: Tensors, module: str) -> nvfp4.QuantizedTensor:
    global_scale = _scalar(checkpoint, f"{module}.weight_scale_2")
    name = f"{module}.weight_scale"
    block_scale = checkpoint.tensor(name)
    raw = block_scale.view(torch.uint8)
    if raw.numel() and raw.max() > 0x80 and (negative := int((raw > 0x80).sum())):
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name} has {negative} negative block scales "
            f"of {raw.numel()} (first: {block_scale[raw > 0x80][0].item()}); export again"
        )
    return nvfp4.QuantizedTensor(checkpoint.tensor(f"{module}.weight"), block_scale, global_scale)


def _scalar(checkpoint: Tensors, name: str) -> torch.Tensor:
    """A positive, finite float32 scalar, stored as [] or [1]."""
    value = checkpoint.tensor(name).reshape(())
    if not value > 0:
        hint = (
            "; an all-zero tensor exports so, with NaN block scales: exclude the module from "
            "quantization"
            if value == 0 and name.endswith("weight_scale_2")
            else "; export again"
        )
        raise CheckpointError(
            f"{checkpoint.info(name).file}: tensor {name} is {value.item()}, expected a positive "
            f"number{hint}"
        )
    return value


def _fuse(modules: Sequence[str], parts: Sequence[nvfp4.QuantizedTensor]) -> nvfp4.QuantizedTensor:
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
    return nvfp4.QuantizedTensor(
        _concatenate([part.codes for part in scaled]),
        _concatenate([part.block_scale for part in scaled]),
        largest,
    )


def _concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
