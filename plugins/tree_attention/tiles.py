"""Tile sizes by SM: chosen by shared memory and registers, never yet by measurement.

The figures behind each row are printed by ``python -m trtree.plugins.tree_attention.report``;
``python -m trtree.runtime.bench gpu`` times them on a GPU.
"""

from dataclasses import dataclass

# Shared memory one CTA may opt in to, bytes (CUDA C++ programming guide, table of technical
# specifications per compute capability). Triton compiles beyond it without a word.
SHARED_LIMIT = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
SMS = tuple(SHARED_LIMIT)

# What the kernels are compiled and tested for.
HEAD_DIMS = (64, 128, 192, 256)
MAX_PAGE_SIZE = 128

FP8_MIN_SM = 89  # older SMs cannot convert e4m3

APPEND_ROWS = 4  # rows of an append program: 16 bytes for each of its threads
COMMIT_ROWS = 16  # accepted rows moved at a time; a block-16 draft accepts no more


@dataclass(frozen=True)
class Tile:
    block_m: int  # tile rows: tree rows times the query heads of a group
    block_n: int  # keys per step
    num_warps: int
    num_stages: int
    # A tree's own rows are a few blocks, which no pipeline helps; without one they leave the
    # registers to the prefix. A prefill chunk's rows are most of its keys.
    tail_stages: int = 1


def attention_tile(sm: int, head_dim: int, rows: int, group: int) -> Tile:
    """The tile for requests of ``rows`` rows (the verify width, or a prefill chunk).

    A tile that holds all rows of a tree reads every key once; a smaller one reads them
    again for each tile, from L2 at best. 128 rows is where registers end (64 at wide heads).
    """
    if sm not in SHARED_LIMIT:
        raise ValueError(f"SM {sm} has no tree-attention tiles; known: {SMS}")
    wide = head_dim > 128
    block_m = 16
    while block_m < min(rows * group, 64 if wide else 128):
        block_m *= 2
    # Page numbers are loaded a step ahead of the K and V they lead to, so 3 stages keep two
    # K and V tiles in shared memory and 5 keep three: for SMs with room and faster memory.
    stages = 5 if SHARED_LIMIT[sm] > 150_000 else 3
    tail_stages = 1 if rows <= 256 else stages
    if wide:
        return Tile(block_m, 32, 4 if block_m <= 32 else 8, stages, tail_stages)
    # At 64 keys a step, ptxas spills here to fit two CTAs on an SM.
    block_n = 32 if head_dim == 64 and sm in (89, 100) else 64
    return Tile(block_m, block_n, 4 if block_m <= 64 else 8, stages, tail_stages)


def require_fp8(sm: int) -> None:
    """Raises ValueError on SMs whose instructions do not know e4m3."""
    if sm < FP8_MIN_SM:
        raise ValueError(
            f"FP8 (e4m3) KV needs SM {FP8_MIN_SM} or newer, this is SM {sm}; use bf16 KV"
        )


def combine_splits(group: int, head_dim: int) -> int:
    """Splits merged at a time: some 4,096 values, 32 registers of each of 128 threads."""
    splits = 1
    while splits < 16 and 2 * splits * group * head_dim <= 4096:
        splits *= 2
    return splits


def combine_warps(group: int, head_dim: int) -> int:
    """No more than 32 values of the result to a thread, where one split is wider than 4,096."""
    warps = 4
    while warps < 16 and warps * 1024 < group * head_dim:
        warps *= 2
    return warps


def commit_columns(row_words: int) -> int:
    """Columns per commit program: enough for 16-byte accesses, few enough to spread."""
    columns = 32
    while columns < min(row_words, 128):
        columns *= 2
    return columns
