"""Tile sizes: chosen by shared memory and registers, never yet by measurement.

``python -m trtree.plugins.branch_report`` prints the figures.
"""

# What the kernels are compiled and tested for.
HEAD_DIMS = (64, 128, 256)

ROWS = 16  # of a block: a tensor core's least, and a budget-16 tree is two of them
VALUE_COLUMNS = 32  # of v, updates and state per program: at 64, registers spill
DECAY_ROWS = 32
COMMIT_ROWS = 16
WARPS = 4
STAGES = 2
DECAY_STAGES = 1  # at 2, 48 heads spill on SM 80 and 89


def key_columns(sm: int) -> int:
    """Of keys and queries at a time: more of them spill on SM 80."""
    return 16 if sm < 89 else 32


def commit_warps(key_dim: int) -> int:
    """More where a program's part of the state is larger: four spill on SM 89 at 256."""
    return 8 if key_dim > 128 else 4


def head_columns(heads: int) -> int:
    """Value heads of a decay program, as a power of two that a product takes."""
    return max(16, 1 << (heads - 1).bit_length())
