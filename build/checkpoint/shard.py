"""One safetensors file: its header validated up front, its tensors mapped one at a time.

The format: a little-endian u64 header length, a JSON header (name -> dtype, shape and
byte range), then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors, "Format").

The header is read here rather than by the safetensors package, so that an error can
name the tensor; and each tensor is mapped alone rather than the whole file at once, so
that a file may be larger than memory and a tensor's pages go when the tensor does.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trtree.build.checkpoint.errors import CheckpointError

# The safetensors package's own limit.
MAX_HEADER_BYTES = 100_000_000
_SMALL = 1 << 14  # bytes that are sooner read than mapped
PAGE = 4096  # a multiple of what disks read at once

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it; offset counts from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, in the order of their bytes; no tensor byte is read.

    Raises:
        CheckpointError: not a safetensors file, or its header contradicts itself or
            the file's length.
    """
    try:
        with path.open("rb") as file:
            header, start = _header(path, file)
            size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(path, name, entry, start) for name, entry in header.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    _check_layout(path, tensors, start, size)
    return tensors


def map_tensor(name: str, info: TensorInfo) -> torch.Tensor:
    """The tensor over its file's pages; writing to it changes a private copy only.

    Raises:
        CheckpointError: the file is gone, or shorter than when its header was read.
    """
    if info.nbytes == 0:
        return torch.empty(info.shape, dtype=info.dtype)
    start = info.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    lead = info.offset - start
    pages: mmap.mmap | bytearray
    try:
        file = opened(info.file)
        if info.nbytes <= _SMALL:
            pages, lead = bytearray(os.pread(file.fileno(), info.nbytes, info.offset)), 0
            if len(pages) < info.nbytes:
                raise ValueError(f"it ends after {len(pages)} of them")
        else:
            pages = mmap.mmap(
                file.fileno(), lead + info.nbytes, access=mmap.ACCESS_COPY, offset=start
            )
    except (OSError, ValueError) as error:
        raise _changed(name, info, error) from None
    raw = torch.frombuffer(pages, dtype=torch.uint8, count=info.nbytes, offset=lead)
    if info.offset % info.dtype.itemsize:
        raw = raw.clone()  # kernels need aligned elements; the format does not promise them
    return raw.view(info.dtype).reshape(info.shape)


def read_pages(name: str, info: TensorInfo, to: memoryview, *, cached: bool) -> None:
    """Fill ``to``, memory of whole pages, with those pages of the file that the tensor is in; what
    is after the tensor need not be. Raises as ``map_tensor``.

    cached: by way of the page cache, to be found there again.
    """
    start = info.offset // PAGE * PAGE
    need = info.offset + info.nbytes - start
    done = 0
    if not cached and (direct := _opened_directly(info.file)):
        with suppress(OSError):  # which the other way has as well, or can do without
            done = os.preadv(direct.fileno(), [to], start)
    try:
        while done < need:
            file = opened(info.file).fileno()
            count = os.preadv(file, [to[done:need]], start + done)
            if count == 0:
                raise ValueError(f"the file ends at {start + done}")
            done += count
    except (OSError, ValueError) as error:
        raise _changed(name, info, error) from None


def give_back(info: TensorInfo) -> None:
    """Have the page cache forget the tensor, which nobody maps any more."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # that it is gone, the next to read it says by name
            file = opened(info.file).fileno()
            os.posix_fadvise(file, info.offset, info.nbytes, os.POSIX_FADV_DONTNEED)


def read_number(name: str, info: TensorInfo) -> float:
    """The single number of a tensor; raises as ``map_tensor``."""
    if info.dtype != torch.float32:
        return float(map_tensor(name, info).item())
    try:
        raw = os.pread(opened(info.file).fileno(), info.nbytes, info.offset)
        return float(struct.unpack("<f", raw)[0])
    except (OSError, struct.error) as error:
        raise _changed(name, info, error) from None


def _changed(name: str, info: TensorInfo, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {name}: cannot map {info.nbytes} bytes at {info.offset} "
        f"({getattr(error, 'strerror', None) or error}); was the file changed after it was "
        "opened?"
    )


def opened(path: Path) -> BinaryIO:
    """A file of experts is opened once, not for each of its thousands of tensors."""
    return _open_once(path, *_identity(path))


def _opened_directly(path: Path) -> FileIO | None:
    """To be read past the page cache, whole pages at a time; None where that is not to be had."""
    try:
        return _open_directly_once(path, *_identity(path))
    except OSError:
        return None


def _identity(path: Path) -> tuple[int, ...]:
    """Tells a file from another that took its name."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


@lru_cache(maxsize=4)
def _open_once(path: Path, *identity: int) -> BinaryIO:
    del identity
    return path.open("rb")


@lru_cache(maxsize=4)
def _open_directly_once(path: Path, *identity: int) -> FileIO | None:
    del identity
    flag: int | None = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | flag))


def _header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the first tensor byte."""
    prefix = file.read(len(_LFS_POINTER))
    if prefix == _LFS_POINTER:
        raise CheckpointError(
            f"{path}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    length = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or length < 2:
        raise CheckpointError(f"{path}: is no safetensors file (no header); download it again")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}; "
            "this is no safetensors file, or a damaged one: download it again"
        )
    file.seek(8)
    text = file.read(length)
    if len(text) < length:
        raise CheckpointError(
            f"{path}: truncated: the header has {length} bytes, the file holds {len(text)} of "
            "them; download it again"
        )
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: header is not valid JSON ({error}); download it again"
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object; download it again")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return result


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: header entry lacks dtype, shape or data_offsets")
    dtype = DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise CheckpointError(
            f"{where}: dtype {entry['dtype']!r} is not supported; supported: {', '.join(DTYPES)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not a byte range")
    info = TensorInfo(dtype, tuple(shape), path, start + offsets[0])
    if info.nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: shape {shape} of {entry['dtype']} takes {info.nbytes} bytes, "
            f"data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return info


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Tensors follow one another without gap or overlap from start to the file's end."""
    end = start
    for name, before, info in _with_previous(tensors):
        if info.offset != end:
            what = "overlaps" if info.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name} begins at byte {info.offset} and {what} {before}, "
                f"which ends at {end}; the header is damaged: download the file again"
            )
        end = info.offset + info.nbytes
        if end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {end}, the file has {size}; "
                "download it again"
            )
    if end != size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {end}, the file has {size}; download it again"
        )


def _with_previous(tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, str, TensorInfo]]:
    names = ["the header", *tensors]
    return ((name, before, tensors[name]) for before, name in pairwise(names))
