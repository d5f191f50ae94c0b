"""Packing a checkpoint's linears for the CPU kernels, straight into the engine's file.

A piece at a time, whatever a linear's size: its rows are read where they are mapped,
checked and laid out in one pass, into memory that the file writes and uses again.
"""

from trtree.build.checkpoint import StoredLinear
from trtree.build.lowering.division import TILE
from trtree.build.resumable import ResumableFile
from trtree.plugins.dense_linear.cpu import ALIGNMENT, DenseRows, Rows
from trtree.plugins.nvfp4_linear.cpu import CodedRows, RoundedRows

_PIECE = 1 << 21  # bytes packed at a time


def append_linear(file: ResumableFile, linear: StoredLinear) -> dict[str, int]:
    """Returns where its packed weight lies.

    Raises:
        ValueError: a number of it is not one to be packed.
    """
    return append_rows(file, _rows(linear))


def append_rows(file: ResumableFile, rows: Rows) -> dict[str, int]:
    """As ``append_linear``."""
    align(file)
    offset = file.tell()
    count = rows.shape[0]
    step = max(1, _PIECE // rows.packed_size(0, min(TILE, count))) * TILE
    for first in range(0, count, step):
        end = min(first + step, count)
        rows.pack(first, end, file.room(rows.packed_size(first, end)))
    return {"offset": offset, "bytes": file.tell() - offset}


def align(file: ResumableFile) -> None:
    """What follows is mapped at a multiple of 64 bytes."""
    file.write(bytes(-file.tell() % ALIGNMENT))


def _rows(linear: StoredLinear) -> Rows:
    if linear.coded:
        return CodedRows(linear.coded)
    if linear.global_scale is None:
        return DenseRows(linear.dense)
    return RoundedRows(linear.dense, linear.global_scale)
