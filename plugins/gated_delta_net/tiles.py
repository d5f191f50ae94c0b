"""Tile sizes: chosen by shared memory and registers, never yet by measurement.

``python -m trtree.plugins.gated_delta_net.report`` prints the figures.
"""

# What the kernels are compiled and tested for.
HEAD_DIMS = (64, 128, 256)

ROWS = 16  # of a block: a tensor core's least, and a budget-16 tree is two of them
DECAY_ROWS = 32
COMMIT_ROWS = 16
WARPS = 4


def value_columns(key_dim: int) -> int:
    """Columns of v per program: its part of the state, 32 KiB, stays on the SM."""
    return 32 if key_dim > 128 else 64


def head_columns(heads: int) -> int:
    """Value heads of a decay program, as a power of two that a product takes."""
    return max(16, 1 << (heads - 1).bit_length())
