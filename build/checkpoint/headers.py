"""Linear modules as headers and configuration describe them, before any byte is read.

A dense linear is one float tensor, an FP8 one has a scale beside it, an NVFP4 one three.
Which one a module is, the configuration and the stored dtype say together: where they
differ, the checkpoint is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch

from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.scheme import (
    ALGORITHMS,
    FP8_BLOCK,
    MODELOPT,
    SVD,
    QuantizationConfig,
    group_sizes,
)
from trtree.build.checkpoint.shard import TensorInfo
from trtree.plugins.nvfp4_linear import format as nvfp4

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn


class Names(NamedTuple):
    """The parts of an NVFP4 linear; reciprocal: whether its globals divide."""

    codes: str
    block_scale: str
    global_scale: str
    input_scale: str
    reciprocal: bool


NAMES = {
    "modelopt": Names("weight", "weight_scale", "weight_scale_2", "input_scale", False),
    "compressed-tensors": Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True
    ),
}
PRE_QUANT_SCALE = "pre_quant_scale"
# Of FP8_BLOCK: multiplies, whatever its name says; [ceil(out / 128), ceil(in / 128)].
BLOCK_SCALE, BLOCK_ROWS = "weight_scale_inv", 128
# Tensors that only quantized linears have; a linear owns these, its weight and its bias.
SCALES = (
    *dict.fromkeys(part for names in NAMES.values() for part in names[1:4]),
    BLOCK_SCALE,
)
# SVDQuant's A [rank, in_features] and B [out_features, rank], each a dense linear by itself.
LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
_SVD_PARTS = (PRE_QUANT_SCALE, *LOW_RANK)
PARTS = ("weight", "weight_packed", "bias", PRE_QUANT_SCALE, *SCALES, *LOW_RANK)
KV_SCALES = ("k_scale", "v_scale")
KV_SCALE_SUFFIXES = tuple(f".{part}" for part in KV_SCALES)
# Left by algorithms that change the arithmetic: never to be dropped silently.
_FOREIGN = ("weight_zero_point", "qweight")
# ModelOpt's exports of language models leave the factors under their quantizer's name.
_QUANTIZER = ".weight_quantizer._"

Info = TypeVar("Info")


def renamed(tensors: Mapping[str, Info]) -> dict[str, Info]:
    """Tensors with the factors of SVDQuant by their own names.

    Raises:
        CheckpointError: a factor is there under both names.
    """
    found: dict[str, Info] = {}
    for name, info in tensors.items():
        module, quantizer, part = name.partition(_QUANTIZER)
        own = f"{module}.{part}" if quantizer and part in LOW_RANK else name
        if own in found or (own != name and own in tensors):
            raise CheckpointError(f"tensors {own} and {name} are both there; export again")
        found[own] = info
    return found


@dataclass(frozen=True)
class LinearInfo:
    """A linear as headers describe it.

    kind: what loading it gives; FP8 weights are widened to dense ones. dtype: of that
    weight's elements. algorithm: how it is stored, None for plain floats.
    has_pre_quant_scale: its input is multiplied by a vector [in_features] first. rank: of the
    factors that are added to its weight, 0 without any.
    """

    kind: Literal["dense", "nvfp4"]
    out_features: int
    in_features: int
    has_bias: bool
    dtype: torch.dtype
    algorithm: str | None = None
    has_pre_quant_scale: bool = False
    rank: int = 0


def is_factor(module: str) -> bool:
    """Whether a linear is one of SVDQuant's factors, which are tensors by themselves."""
    return module.endswith(LOW_RANK)


def dense_name(module: str) -> str:
    """The tensor of a linear whose weight is not packed."""
    return module if is_factor(module) else f"{module}.weight"


def weight_info(tensors: Mapping[str, TensorInfo], module: str) -> TensorInfo | None:
    """The tensor that holds the module's weight, whatever it is called; None if there is none."""
    return tensors.get(f"{module}.weight_packed") or tensors.get(dense_name(module))


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
    names = NAMES[quantization.layout if quantization else "modelopt"]
    _refuse_foreign(tensors, quantization, names, module)
    weight = weight_info(tensors, module)
    if weight is None:
        raise CheckpointError(f"the checkpoint has no tensor {dense_name(module)}")
    if is_factor(module):
        check_dense(module, weight)
        return LinearInfo("dense", *_two_axes(module, weight), False, weight.dtype)
    algorithm = _algorithm(weight, quantization, names, module)
    if algorithm is None:
        info = _describe_dense(tensors, module, weight)
    elif ALGORITHMS[algorithm].weights == "fp8":
        info = _describe_fp8(tensors, module, weight, algorithm)
    else:
        if algorithm == SVD and not any(f"{module}.{part}" in tensors for part in _SVD_PARTS):
            algorithm = "NVFP4"  # ModelOpt names those that its search skipped no differently
        info = _describe_nvfp4(tensors, names, module, weight, algorithm)
    if (bias := tensors.get(f"{module}.bias")) is not None:
        _expect(f"{module}.bias", bias, [(info.out_features,)], DENSE_DTYPES)
    return info


def scaled_for_one_expert(
    names: Sequence[str], quantization: QuantizationConfig | None
) -> str | None:
    """The first MLP whose experts each scale their input, but for the shared one, whose vector
    AWQ's exporter therefore folded into the norm that all of them read."""
    if quantization is None:
        return None
    present = set(names)
    for name in names:
        mlp, shared, scale = name.rpartition(".shared_expert")
        if shared and scale.endswith("up_proj.weight_scale_2"):
            module = name.removesuffix(".weight_scale_2")
            own, others = (f"{m}.{PRE_QUANT_SCALE}" for m in (module, f"{mlp}.experts.0.up_proj"))
            folded = own not in present and others in present
            if folded and quantization.algorithm_of(module) == "NVFP4_AWQ":
                return mlp
    return None


def check_quantized_modules(
    tensors: Mapping[str, TensorInfo], quantization: QuantizationConfig | None
) -> None:
    """Describe every module that holds a quantized tensor, and every expert.

    A family asks only for the modules it knows; this finds the others' faults too.

    Raises:
        CheckpointError: as ``describe``, for the first module at fault.
    """
    for fault in faults(tensors, quantization):
        raise CheckpointError(fault)


def faults(
    tensors: Mapping[str, TensorInfo], quantization: QuantizationConfig | None
) -> Iterator[str]:
    """What is wrong with the modules that ``check_quantized_modules`` looks at, one by one."""
    described = set()
    svd = quantization if quantization and quantization.algorithm == SVD else None
    if svd and not any(name.endswith(LOW_RANK) for name in tensors):
        yield (
            f"{svd.source} says {SVD}, but no module has a tensor {LOW_RANK[0]}; were they left "
            "out? Export again, or correct it to NVFP4"
        )
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        expert = ".experts." in name and len(info.shape) == 2
        weight = part in ("weight", "weight_packed")
        quantized = part in SCALES or (weight and info.dtype in (torch.uint8, FP8))
        try:
            if (quantized or (expert and weight)) and module not in described:
                described.add(module)
                describe(tensors, quantization, module)
            if part in KV_SCALES:
                _check_kv_scale(name, info, quantization)
        except CheckpointError as error:
            yield str(error)


def _check_kv_scale(name: str, info: TensorInfo, quantization: QuantizationConfig | None) -> None:
    _expect(name, info, [(), (1,)], DENSE_DTYPES)
    if quantization is None or quantization.kv_cache is None:
        raise CheckpointError(
            f"{info.file}: tensor {name} is a scale of a quantized KV cache, but the "
            "configuration names no KV-cache quantization; correct it, or export again"
        )


def _refuse_foreign(
    tensors: Mapping[str, TensorInfo],
    quantization: QuantizationConfig | None,
    names: Names,
    module: str,
) -> None:
    others = {part for other in NAMES.values() for part in other[:4]} | {BLOCK_SCALE}
    if quantization is not None and quantization.algorithm == FP8_BLOCK:
        others -= {"weight", BLOCK_SCALE}
    else:
        others -= {*names[:4], "weight"}
    for part in (*_FOREIGN, *sorted(others)):
        if (extra := tensors.get(f"{module}.{part}")) is not None:
            what = f"{quantization.source} describes" if quantization else "config.json describes"
            raise CheckpointError(
                f"{extra.file}: tensor {module}.{part} belongs to a quantization that is not "
                f"supported, or not the one that {what}; supported: "
                f"{', '.join(MODELOPT)} of ModelOpt, NVFP4 and FP8 of compressed-tensors, "
                "FP8 in blocks"
            )


def _algorithm(
    weight: TensorInfo, quantization: QuantizationConfig | None, names: Names, module: str
) -> str | None:
    """How the module is stored: its dtype against what the configuration says of it."""
    packed = quantization is not None and names.codes != "weight"
    name = (
        f"{module}.weight_packed" if packed and weight.dtype == torch.uint8 else f"{module}.weight"
    )
    where = f"{weight.file}: tensor {name} is {_dtype(weight)}"
    stored = {torch.uint8: "nvfp4", FP8: "fp8"}.get(weight.dtype)
    if stored is None and weight.dtype not in DENSE_DTYPES:
        raise CheckpointError(
            f"{where}; supported: {_dtypes(DENSE_DTYPES)}, NVFP4 as uint8 and float8_e4m3fn"
        )
    if quantization is None:
        if stored is not None:
            raise CheckpointError(
                f"{where}, but the checkpoint has no quantization config; add the exporter's "
                "hf_quant_config.json"
            )
        return None
    algorithm = quantization.algorithm_of(module)
    if algorithm is None:
        if stored is not None:
            raise CheckpointError(
                f"{where}, but {quantization.source} excludes {module} from quantization; "
                "correct the exclusions, or export again"
            )
        return None
    if stored is None:
        # Block FP8 does not list all that it leaves alone: routers, heads.
        if _is_embedding(module) or algorithm == FP8_BLOCK:
            return None
        raise CheckpointError(
            f"{where}, but {quantization.source} says that {module} is {algorithm}; it was left "
            "unquantized: list it in the exclusions, or export again"
        )
    if stored != ALGORITHMS[algorithm].weights:
        raise CheckpointError(
            f"{where}, but {quantization.source} says that {module} is {algorithm}; correct it, "
            "or export again"
        )
    return algorithm


def _describe_dense(
    tensors: Mapping[str, TensorInfo], module: str, weight: TensorInfo
) -> LinearInfo:
    rows, columns = _two_axes(module, weight)
    for part in (*SCALES, PRE_QUANT_SCALE):
        if f"{module}.{part}" in tensors:
            raise CheckpointError(
                f"{weight.file}: tensor {module}.weight is {_dtype(weight)}, but {module}.{part} "
                "is there as well; the export is inconsistent: export again"
            )
    return LinearInfo("dense", rows, columns, f"{module}.bias" in tensors, weight.dtype)


def _describe_fp8(
    tensors: Mapping[str, TensorInfo], module: str, weight: TensorInfo, algorithm: str
) -> LinearInfo:
    rows, columns = _two_axes(module, weight)
    has_bias = f"{module}.bias" in tensors
    if algorithm == FP8_BLOCK:
        scale = _needed(tensors, module, BLOCK_SCALE, weight, algorithm)
        blocks = (-(-rows // BLOCK_ROWS), -(-columns // BLOCK_ROWS))
        _expect(f"{module}.{BLOCK_SCALE}", scale, [blocks], DENSE_DTYPES)
        return LinearInfo("dense", rows, columns, has_bias, torch.float32, algorithm)
    scale = _needed(tensors, module, "weight_scale", weight, algorithm)
    per_channel = [(rows, 1), (rows,)] if algorithm != "FP8" else []
    _expect(f"{module}.weight_scale", scale, [(), (1,), *per_channel], DENSE_DTYPES)
    if (given := tensors.get(f"{module}.input_scale")) is not None:
        _expect(f"{module}.input_scale", given, [(), (1,)], DENSE_DTYPES)
    return LinearInfo("dense", rows, columns, has_bias, scale.dtype, algorithm)


def _describe_nvfp4(
    tensors: Mapping[str, TensorInfo],
    names: Names,
    module: str,
    weight: TensorInfo,
    algorithm: str,
) -> LinearInfo:
    takes_inputs = ALGORITHMS[algorithm].activations == "nvfp4"
    for part in names[1:4] if takes_inputs else names[1:3]:
        _needed(tensors, module, part, weight, algorithm)
    if len(weight.shape) != 2 or not weight.shape[1] or weight.shape[1] * 2 % nvfp4.BLOCK:
        raise CheckpointError(
            f"{weight.file}: tensor {module}.{names.codes} has shape {list(weight.shape)}, "
            f"expected [out_features, in_features / 2] with in_features a multiple of {nvfp4.BLOCK}"
        )
    rows, columns = weight.shape[0], weight.shape[1] * 2
    scale = f"{module}.{names.block_scale}"
    groups = [size for size in group_sizes(algorithm) if columns % size == 0]
    _expect(scale, tensors[scale], [(rows, columns // size) for size in groups], (FP8,))
    for part in names[2:4]:
        if (info := tensors.get(f"{module}.{part}")) is not None:
            _expect(f"{module}.{part}", info, [(), (1,)], (torch.float32,))
    has_bias = f"{module}.bias" in tensors
    if algorithm == SVD:
        _needed(tensors, module, PRE_QUANT_SCALE, weight, algorithm)
    scaled = _check_pre_quant_scale(tensors, module, columns, algorithm)
    rank = _check_low_rank(tensors, module, rows, columns, weight, algorithm)
    return LinearInfo("nvfp4", rows, columns, has_bias, weight.dtype, algorithm, scaled, rank)


def _check_pre_quant_scale(
    tensors: Mapping[str, TensorInfo], module: str, columns: int, algorithm: str
) -> bool:
    """AWQ's exporter folds the vector into the norm before, where there is one."""
    name = f"{module}.{PRE_QUANT_SCALE}"
    info = tensors.get(name)
    if info is None:
        return False
    if algorithm not in ("NVFP4_AWQ", SVD):
        raise CheckpointError(
            f"{info.file}: tensor {name} belongs to NVFP4_AWQ, but the configuration says that "
            f"{module} is {algorithm}; correct it, or export again"
        )
    _expect(name, info, [(columns,)], DENSE_DTYPES)
    return True


def _check_low_rank(
    tensors: Mapping[str, TensorInfo],
    module: str,
    rows: int,
    columns: int,
    weight: TensorInfo,
    algorithm: str,
) -> int:
    """The factors' rank; 0 without them."""
    first, second = (f"{module}.{factor}" for factor in LOW_RANK)
    if algorithm != SVD:
        for name in (first, second):
            if (extra := tensors.get(name)) is not None:
                raise CheckpointError(
                    f"{extra.file}: tensor {name} belongs to {SVD}, but the configuration says "
                    f"that {module} is {algorithm}; correct it, or export again"
                )
        return 0
    a, b = (_needed(tensors, module, factor, weight, algorithm) for factor in LOW_RANK)
    rank = a.shape[0] if a.shape else 0
    if rank == 0 or a.shape != (rank, columns):
        raise CheckpointError(
            f"{a.file}: tensor {first} has shape {list(a.shape)}, expected [rank, {columns}]"
        )
    check_dense(first, a)
    _expect(second, b, [(rows, rank)], DENSE_DTYPES)
    return rank


def _needed(
    tensors: Mapping[str, TensorInfo], module: str, part: str, weight: TensorInfo, algorithm: str
) -> TensorInfo:
    if (info := tensors.get(f"{module}.{part}")) is None:
        raise CheckpointError(
            f"{weight.file}: {module} is {algorithm} but has no tensor {module}.{part}; "
            "export again"
        )
    return info


def _two_axes(module: str, weight: TensorInfo) -> tuple[int, int]:
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.file}: tensor {dense_name(module)} has shape {list(weight.shape)}, expected "
            "[out_features, in_features]"
        )
    return weight.shape[0], weight.shape[1]


def check_dense(name: str, info: TensorInfo) -> None:
    """Raises CheckpointError if a tensor's numbers are of a type that is not read."""
    _expect(name, info, [info.shape], DENSE_DTYPES)


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
