"""Packing a checkpoint's linears for the CPU kernels, straight into the engine's file.

A piece at a time, whatever a linear's size: its rows are read, then checked and laid out in
one pass, into memory that the file writes; the memory of both is used again.
"""

from collections.abc import Sequence

from trtree.build.checkpoint import StoredLinear
from trtree.build.checkpoint.matrix import Room, take
from trtree.build.lowering.division import TILE
from trtree.build.lowering.weights import WeightReader
from trtree.build.resumable import ResumableFile
from trtree.plugins.dense_linear import cpu as dense_cpu
from trtree.plugins.dense_linear.cpu import ALIGNMENT, DenseRows, Rows
from trtree.plugins.nvfp4_linear import cpu as nvfp4_cpu
from trtree.plugins.nvfp4_linear.cpu import CodedRows, RoundedRows

_PIECE = 1 << 21  # bytes read, and packed, at a time
_room = Room()


def append_linear(
    file: ResumableFile, linear: StoredLinear, modules: Sequence[str], checkpoint: WeightReader
) -> dict[str, int]:
    """The checkpoint's linear of these modules; returns where its packed weight lies.

    Raises:
        CheckpointError: a number is not one to be packed; names its tensor.
    """
    align(file)
    offset = file.tell()
    count = linear.shape[0]
    step = max(1, _PIECE // _tile_bytes(linear)) * TILE
    try:
        for first in range(0, count, step):
            end = min(first + step, count)
            _room.clear()
            _append(file, _rows(linear, first, end))
    except ValueError:
        checkpoint.linear(modules)  # reads it again, and finds what is at fault
        raise
    return {"offset": offset, "bytes": file.tell() - offset}


def append_rows(file: ResumableFile, rows: Rows) -> dict[str, int]:
    """Any rows, all at once; ValueError where a number is not one to be packed."""
    align(file)
    offset = file.tell()
    _append(file, rows)
    return {"offset": offset, "bytes": file.tell() - offset}


def _append(file: ResumableFile, rows: Rows) -> None:
    count = rows.shape[0]
    rows.pack(0, count, file.room(rows.packed_size(0, count)))


def align(file: ResumableFile) -> None:
    """What follows is mapped at a multiple of 64 bytes."""
    file.write(bytes(-file.tell() % ALIGNMENT))


def _tile_bytes(linear: StoredLinear) -> int:
    """Of a tile, packed or as it is stored, whichever are more."""
    k = linear.shape[1]
    if linear.codes:
        return nvfp4_cpu.packed_size(TILE, k)
    return dense_cpu.packed_size(TILE, k, linear.dense[0].dtype)


def _rows(linear: StoredLinear, first: int, end: int) -> Rows:
    """Rows ``first`` to ``end``, for as long as the room is not cleared."""
    if linear.codes:
        codes = take(linear.codes, first, end, _room)
        scales = take(linear.block_scales, first, end, _room)
        return CodedRows(codes, scales)
    dense = take(linear.dense, first, end, _room)
    if linear.global_scale is None:
        return DenseRows(dense)
    return RoundedRows(dense, linear.global_scale)
