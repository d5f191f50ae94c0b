"""Writing safetensors files one tensor at a time, so that memory stays near the largest.

The safetensors library writes whole dictionaries; the format itself (an 8-byte length,
a JSON header, the bytes) allows streaming once shapes are known.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class TensorSpec(NamedTuple):
    """What a tensor will be, before its bytes are known."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class TensorFileWriter:
    """Context manager over one new file: declare all tensors, then write each once, in order.

    Raises:
        ValueError: a tensor is out of order, missing, or not what was declared.
        OSError: the disk is full or not writable.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = dict(specs)
        self._pending = list(specs)
        header, offset = {}, 0
        for name, spec in self._specs.items():
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        encoded = json.dumps(header).encode()
        encoded += b" " * (-(8 + len(encoded)) % 64)  # the data starts on a cache line
        self._stream = path.open("xb")
        self._stream.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next declared tensor."""
        expected = self._pending.pop(0) if self._pending else None
        if name != expected:
            raise ValueError(f"{self._stream.name}: {name} written, {expected} is next")
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if spec != self._specs[name]:
            raise ValueError(f"{self._stream.name}: {name} is {spec}, declared {self._specs[name]}")
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._stream.write(data.numpy().data)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stream.close()
        if kind is None and self._pending:
            raise ValueError(f"{self._stream.name}: {self._pending[0]} was never written")
