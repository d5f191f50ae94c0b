"""Matrices of a checkpoint, read some rows at a time.

Small matrices are read past the page cache, where the system can, into memory that is used
again; large ones are mapped, and their pages given back at once. For a checkpoint may be
larger than memory, and to find memory for ever new pages can take longer than all the rest of
a conversion, on virtual machines above all. Nor can pages of small ones be given back alone:
the cache keeps larger folios, in which neighbours lie.
"""

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trtree.build.checkpoint.shard import PAGE, TensorInfo, give_back, map_tensor, read_pages

_ROOM = (1 << 21) + (1 << 16)
_LARGE = 1 << 23  # bytes of a matrix that is read in sequence


class Room(threading.local):
    """Memory that rows are read into, a thread's own; ``clear`` has it used again."""

    def __init__(self) -> None:
        self._memory = _pages(_ROOM)
        self._used = 0
        self._behind: list[TensorInfo] = []

    def clear(self) -> None:
        """Nobody holds rows any more."""
        self._used = 0
        for info in self._behind:
            give_back(info)
        self._behind.clear()

    def map(self, name: str, info: TensorInfo, *, behind: TensorInfo) -> torch.Tensor:
        """``map_tensor``; behind: what the page cache need not keep after ``clear``."""
        self._behind.append(behind)
        return map_tensor(name, info)

    def read(self, name: str, info: TensorInfo, *, shared: bool) -> torch.Tensor:
        """The tensor, not checked; shared: others may read it as well, so that it had better
        stay in the page cache.

        Raises:
            CheckpointError: as ``map_tensor``.
        """
        lead = info.offset % PAGE
        size = -(-(lead + info.nbytes) // PAGE) * PAGE
        start, memory = self._used, self._memory
        if start + size > len(memory):
            start, memory = 0, _pages(size)  # one large tile; not kept
        else:
            self._used += size
        to = memory[start : start + size]
        read_pages(name, info, to.data, cached=shared)
        raw = to[lead : lead + info.nbytes]
        if info.offset % info.dtype.itemsize:
            raw = raw.copy()  # as ``map_tensor``
        return torch.from_numpy(raw).view(info.dtype).view(info.shape)


def _pages(size: int) -> npt.NDArray[np.uint8]:
    """Memory from a page's begin on."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class Matrix(Protocol):
    """A matrix [O, K] of elements of ``dtype``, or K / 2 or K / 16 columns of an NVFP4 one."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, first: int, end: int, room: Room) -> torch.Tensor:
        """Rows ``first`` to ``end``, in contiguous rows, until ``room`` is cleared; not
        checked."""

    def cut(self, rows: range | None, columns: range | None) -> "Matrix":
        """Some rows, or of each row some columns, which others may read as well."""


@dataclass(frozen=True)
class StoredMatrix:
    """In a file. columns: of the file's; shared: it may be read again by others."""

    name: str
    info: TensorInfo
    columns: range | None = None
    shared: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.info.shape
        return rows, columns if self.columns is None else len(self.columns)

    @property
    def dtype(self) -> torch.dtype:
        return self.info.dtype

    def rows(self, first: int, end: int, room: Room) -> torch.Tensor:
        part = self._part(first, end)
        if self.columns is None:
            if self.shared or self.info.nbytes < _LARGE:
                return room.read(self.name, part, shared=self.shared)
            # From the first row on: what lay across an end before lies inside now.
            return room.map(self.name, part, behind=self._part(0, end))
        # Of every row a part is touched.
        return map_tensor(self.name, part)[:, self.columns.start : self.columns.stop]

    def cut(self, rows: range | None, columns: range | None) -> "StoredMatrix":
        if rows is not None:
            return replace(self, info=self._part(rows.start, rows.stop))
        return replace(self, columns=columns, shared=True)

    def _part(self, first: int, end: int) -> TensorInfo:
        info = self.info
        rows, columns = info.shape
        if (first, end) == (0, rows):
            return info
        row = columns * info.dtype.itemsize
        return TensorInfo(info.dtype, (end - first, columns), info.file, info.offset + first * row)


@dataclass(frozen=True)
class HeldMatrix:
    """In memory."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, first: int, end: int, room: Room) -> torch.Tensor:
        del room
        return self.tensor[first:end]

    def cut(self, rows: range | None, columns: range | None) -> "HeldMatrix":
        if rows is not None:
            return HeldMatrix(self.tensor[rows.start : rows.stop])
        if columns is not None:
            return HeldMatrix(self.tensor[:, columns.start : columns.stop])
        return self


def take(matrices: Sequence[Matrix], first: int, end: int, room: Room) -> list[torch.Tensor]:
    """Rows of matrices that follow one another, as one tensor of each that has some."""
    taken = []
    for matrix in matrices:
        rows = matrix.shape[0]
        if first < rows and end > 0:
            taken.append(matrix.rows(max(first, 0), min(end, rows), room))
        first, end = first - rows, end - rows
    return taken


def cut_rows(matrices: Sequence[Matrix], ranges: Sequence[range]) -> tuple[Matrix, ...]:
    """The ranges' rows of matrices that follow one another."""
    cut: list[Matrix] = []
    for rows in ranges:
        start = 0
        for matrix in matrices:
            count = matrix.shape[0]
            first, end = max(rows.start - start, 0), min(rows.stop - start, count)
            if first < end:
                cut.append(matrix.cut(range(first, end), None))
            start += count
    return tuple(cut)
