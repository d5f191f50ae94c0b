"""Tile sizes of the indexer's kernels: chosen by registers and shared memory, never measured."""

from dataclasses import dataclass

from trtree.plugins.tree_attention.tiles import SHARED_LIMIT, SMS

# Scores of a row that the choice looks at together.
TOP_K_BLOCK = 2048
TOP_K_WARPS = 8


@dataclass(frozen=True)
class IndexTile:
    rows: int  # of the step, a power of two; their index heads are the tile's rows
    block_n: int  # keys per step
    num_warps: int
    num_stages: int


def index_tile(sm: int, rows: int, heads: int) -> IndexTile:
    """The tile for requests of ``rows`` rows: 128 rows times heads, if there are as many.

    Raises:
        ValueError: an unknown SM.
    """
    if sm not in SHARED_LIMIT:
        raise ValueError(f"SM {sm} has no indexer tiles; known: {SMS}")
    padded = 1 << (heads - 1).bit_length()
    together = 1
    while together * padded < 128 and (together < rows or together * padded < 16):
        together *= 2
    return IndexTile(together, 64, 8 if together * padded > 64 else 4, 3)
