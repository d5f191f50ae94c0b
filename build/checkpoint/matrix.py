"""Matrices of a checkpoint, read some rows at a time.

Pages of files that were read are given back at once: what a checkpoint larger than memory
would push out of it is worth more, and finding memory for ever new pages can take longer
than all the rest of a conversion, on virtual machines above all.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from trtree.build.checkpoint.shard import TensorInfo, map_tensor, opened

_LEAST = 1 << 16  # bytes that are worth giving back


class Matrix(Protocol):
    """A matrix [O, K] of elements of ``dtype``, or K / 2 or K / 16 columns of an NVFP4 one."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, first: int, end: int) -> torch.Tensor:
        """Rows ``first`` to ``end``, in contiguous rows; not checked."""

    def release(self, end: int) -> None:
        """Rows before ``end`` will not be read again, and nobody holds them any more."""

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
        return self.info.shape[0], len(self.columns or range(self.info.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.info.dtype

    def rows(self, first: int, end: int) -> torch.Tensor:
        whole = map_tensor(self.name, self._part(first, end))
        return whole if self.columns is None else whole[:, self.columns.start : self.columns.stop]

    def release(self, end: int) -> None:
        part = self._part(0, end)
        if part.nbytes >= _LEAST and not self.shared and hasattr(os, "posix_fadvise"):
            # From the first row on: what lay across an end before lies inside now.
            with suppress(OSError):  # that it is gone, the next to read it says by name
                file = opened(part.file).fileno()
                os.posix_fadvise(file, part.offset, part.nbytes, os.POSIX_FADV_DONTNEED)

    def cut(self, rows: range | None, columns: range | None) -> "StoredMatrix":
        if rows is not None:
            return replace(self, info=self._part(rows.start, rows.stop))
        return replace(self, columns=columns, shared=True)

    def _part(self, first: int, end: int) -> TensorInfo:
        row = self.info.nbytes // self.info.shape[0]
        return replace(
            self.info,
            shape=(end - first, self.info.shape[1]),
            offset=self.info.offset + first * row,
        )


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

    def rows(self, first: int, end: int) -> torch.Tensor:
        return self.tensor[first:end]

    def release(self, end: int) -> None:
        del end

    def cut(self, rows: range | None, columns: range | None) -> "HeldMatrix":
        if rows is not None:
            return HeldMatrix(self.tensor[rows.start : rows.stop])
        if columns is not None:
            return HeldMatrix(self.tensor[:, columns.start : columns.stop])
        return self


def take(matrices: Sequence[Matrix], first: int, end: int) -> list[torch.Tensor]:
    """Rows of matrices that follow one another, as one tensor of each that has some."""
    taken = []
    for matrix in matrices:
        rows = matrix.shape[0]
        if first < rows and end > 0:
            taken.append(matrix.rows(max(first, 0), min(end, rows)))
        first, end = first - rows, end - rows
    return taken


def release(matrices: Sequence[Matrix], end: int) -> None:
    """Rows before ``end`` of matrices that follow one another are done with."""
    for matrix in matrices:
        rows = matrix.shape[0]
        if end > 0:
            matrix.release(min(end, rows))
        end -= rows


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
