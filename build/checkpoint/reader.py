"""Reading a Hugging Face checkpoint directory, one tensor at a time.

Headers are read and checked when the directory is opened; tensor bytes only when they
are asked for, as mapped pages of their file, so that peak memory stays near the
largest tensor.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from trtree.build.checkpoint import fused_experts, headers, linear, text_part
from trtree.build.checkpoint.errors import CheckpointError, NoWeightsError
from trtree.build.checkpoint.headers import LinearInfo
from trtree.build.checkpoint.json_file import read_json
from trtree.build.checkpoint.linear import LinearWeight, StoredLinear
from trtree.build.checkpoint.matrix import StoredMatrix
from trtree.build.checkpoint.patterns import left_out, matcher
from trtree.build.checkpoint.quantization import read_quantization
from trtree.build.checkpoint.scheme import QuantizationConfig
from trtree.build.checkpoint.shard import TensorInfo, map_tensor, read_header, read_number

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NAMED_IN_ERRORS = 5


class Checkpoint:
    """An opened checkpoint directory; see ``open``.

    config: config.json. quantization: None for a plain checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        quantization: QuantizationConfig | None,
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.directory = directory
        self.config = config
        self.quantization = quantization
        self._tensors = tensors
        self._linears: dict[str, LinearInfo] = {}  # that were described
        self._digests: dict[str, str] = {}

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read configuration and headers, and check all that they tell.

        Raises:
            CheckpointError: not a checkpoint directory, a file is missing or damaged,
                the quantization is not supported or contradicts the tensors.
        """
        _check_directory(directory)
        file = directory / "config.json"
        config = text_part.text_config(read_json(file), str(file))
        quantization = text_part.quantization(read_quantization(directory, config))
        found = headers.renamed(text_part.tensors(read_headers(directory)))
        tensors = fused_experts.split(found, config)
        ignored = matcher(left_out(config))
        used = {name: info for name, info in tensors.items() if not ignored.fullmatch(name)}
        headers.check_quantized_modules(used, quantization)
        return cls(directory, config, quantization, tensors)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def __contains__(self, tensor_name: object) -> bool:
        return tensor_name in self._tensors

    def info(self, tensor_name: str) -> TensorInfo:
        """A tensor's dtype, shape and file; no bytes are read.

        Raises:
            CheckpointError: there is no such tensor.
        """
        try:
            return self._tensors[tensor_name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: has no tensor {tensor_name}") from None

    def tensor(self, tensor_name: str) -> torch.Tensor:
        """The tensor, over mapped pages that live as long as it does.

        Raises:
            CheckpointError: there is no such tensor, its file changed, or a value is NaN
                or infinite.
        """
        info = self.info(tensor_name)
        tensor = map_tensor(tensor_name, info)
        _check_finite(tensor_name, info, tensor)
        return tensor

    def stored(self, tensor_name: str) -> StoredMatrix:
        """A tensor of two axes, not read yet: for those who check it while they read it."""
        return StoredMatrix(tensor_name, self.info(tensor_name))

    def number(self, tensor_name: str) -> float:
        """A tensor of one number, whatever it is."""
        return read_number(tensor_name, self.info(tensor_name))

    def linear_info(self, module: str) -> LinearInfo:
        """What kind of linear ``module`` is, from headers only.

        Raises:
            CheckpointError: see ``headers.describe``.
        """
        info = self._linears.get(module)
        if info is None:
            self.weight_info(module)  # its absence is named with the directory
            info = headers.describe(self._tensors, self.quantization, module)
            self._linears[module] = info
        return info

    def has_weight(self, module: str) -> bool:
        """Whether the module is in the checkpoint."""
        return headers.weight_info(self._tensors, module) is not None

    def weight_info(self, module: str) -> TensorInfo:
        """The tensor that holds a module's weight, as stored.

        Raises:
            CheckpointError: there is none.
        """
        info = headers.weight_info(self._tensors, module)
        return info or self.info(headers.dense_name(module))

    def input_digest(self, module: str) -> str:
        """Stands for the vector that a module's input is multiplied by first.

        Raises:
            CheckpointError: there is none, or a value is not a positive number.
        """
        return self._digest(f"{module}.{headers.PRE_QUANT_SCALE}", linear.input_vector)

    def factor_digest(self, module: str) -> str:
        """Stands for the first of a module's low-rank factors.

        Raises:
            CheckpointError: there is none, or a value is NaN or infinite.
        """
        return self._digest(f"{module}.{headers.LOW_RANK[0]}", Checkpoint.tensor)

    def _digest(self, name: str, read: Callable[["Checkpoint", str], torch.Tensor]) -> str:
        """Of what ``read`` gives; kept, as networks ask more than once."""
        if name not in self._digests:
            numbers = read(self, name).float().contiguous().numpy()
            self._digests[name] = hashlib.sha256(numbers.tobytes()).hexdigest()[:16]
        return self._digests[name]

    def kv_scales(self) -> dict[str, float]:
        """The KV cache's calibrated scales, by tensor name.

        Raises:
            CheckpointError: one is not a positive number.
        """
        names = [name for name in self.names() if name.endswith(headers.KV_SCALE_SUFFIXES)]
        return {name: float(linear.positive_scalar(self, name)) for name in names}

    def linear(self, modules: Sequence[str]) -> LinearWeight:
        """One linear, or several fused along out_features in the given order.

        Modules that ``linear_info`` describes with different kinds, dtypes or
        in_features cannot be fused.

        Raises:
            CheckpointError: see ``linear.load``.
        """
        return linear.load(self, modules)

    def stored_linear(self, modules: Sequence[str]) -> StoredLinear:
        """The same, its large tensors not read yet.

        Raises:
            CheckpointError: see ``linear.stored``.
        """
        return linear.stored(self, modules)

    def check_coverage(self, used: Iterable[str], ignored: Iterable[str] = ()) -> None:
        """Every tensor of the checkpoint must be used, or ignored on purpose.

        Args:
            used: names of tensors, or of modules; a module covers its weight, bias and
                scales.
            ignored: patterns of tensor names, exact or with ``*``.

        Raises:
            CheckpointError: naming some of the tensors left over, and their count.
        """
        names = set(used)
        ignore = matcher(ignored)
        left = [
            name
            for name in self.names()
            if name not in names
            and not _covered_by_module(name, names)
            and not ignore.fullmatch(name)
        ]
        if left:
            raise CheckpointError(
                f"{self.directory}: {len(left)} of {len(self._tensors)} tensors would not be "
                f"used: {_some(left)}; is this another model family than config.json says?"
            )


def _covered_by_module(name: str, modules: set[str]) -> bool:
    module, _, part = name.rpartition(".")
    # The KV cache's scales belong to the attention, or to its projections.
    return (part in headers.PARTS and module in modules) or part in headers.KV_SCALES


def _check_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    if directory.exists():
        raise CheckpointError(f"{directory}: is a file; give the checkpoint's directory")
    message = f"{directory}: no such directory"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)):
        message += (
            f"; if this is a Hugging Face id, download it first: hf download {directory} "
            f"--local-dir {directory.name}, then give {directory.name}"
        )
    raise CheckpointError(message)


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the directory, from one file or from the shards of an index.

    Raises:
        CheckpointError: a file is missing or damaged, or there is none.
    """
    single, index = directory / SINGLE, directory / INDEX
    if index.exists():
        return _read_shards(directory, index)
    if single.exists():
        return read_header(single)
    if shards := sorted(p.name for p in directory.glob("*.safetensors")):
        raise CheckpointError(
            f"{directory}: has {_some(shards)} but neither {SINGLE} nor {INDEX}; download the index"
        )
    if pickles := sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern)):
        raise CheckpointError(
            f"{directory}: holds pickle files ({_some(pickles)}), which can run code when read; "
            "convert them to safetensors"
        )
    raise NoWeightsError(f"{directory}: has no {SINGLE} and no {INDEX}")


def _read_shards(directory: Path, index: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; download it again")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name} is mapped to {file!r}, no file name")
        files.setdefault(file, []).append(name)
    _check_files(directory, index, files)
    tensors: dict[str, TensorInfo] = {}
    for file, names in files.items():
        header = read_header(directory / file)
        if missing := sorted(set(names) - header.keys()):
            raise CheckpointError(
                f"{directory / file}: lacks {_some(missing)}, which {INDEX} maps to it; "
                "download both again"
            )
        if extra := sorted(header.keys() - set(names)):
            raise CheckpointError(
                f"{directory / file}: holds {_some(extra)}, which {INDEX} does not map to it; "
                "download both again"
            )
        tensors |= header
    return tensors


def _check_files(directory: Path, index: Path, files: dict[str, list[str]]) -> None:
    """The index's shards are exactly those present."""
    if absent := sorted(file for file in files if not (directory / file).exists()):
        tensors = sum(len(files[file]) for file in absent)
        raise CheckpointError(
            f"{directory}: lacks {_some(absent)} ({tensors} tensors), which {INDEX} names; "
            "download the rest"
        )
    present = {p.name for p in directory.glob("*.safetensors") if _SHARD.fullmatch(p.name)}
    if (directory / SINGLE).exists():
        present.add(SINGLE)
    if extra := sorted(present - files.keys()):
        raise CheckpointError(
            f"{index}: does not name {_some(extra)}; remove the files of the other model, or "
            "download the index again"
        )


def _check_finite(name: str, info: TensorInfo, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    if tensor.numel() == 1 and math.isfinite(tensor.item()):
        return  # most tensors of experts are scales; torch's ways take longer
    if info.dtype == torch.float8_e4m3fn:
        # torch has no test for this type, whose NaN is all ones below the sign.
        bad = (tensor.view(torch.uint8) & 0x7F) == 0x7F
    elif info.dtype.itemsize == 1:
        bad = ~torch.isfinite(tensor)
    else:
        # NaN and infinity both survive in the extremes: one pass, nothing allocated.
        low, high = torch.aminmax(tensor)
        if torch.isfinite(low) and torch.isfinite(high):
            return
        bad = ~torch.isfinite(tensor)
    if count := int(bad.sum()):
        first = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{info.file}: tensor {name}: {count} of {tensor.numel()} values are NaN or infinite "
            f"(first at {first}); export again"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_ERRORS])
    rest = len(names) - _NAMED_IN_ERRORS
    return f"{shown} and {rest} more" if rest > 0 else shown
