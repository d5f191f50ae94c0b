"""Tile sizes of latent attention: chosen by registers and shared memory, never by measurement.

The figures are printed by ``python -m trtree.plugins.mla_attention.report``.
"""

from dataclasses import dataclass

from trtree.plugins.tree_attention.tiles import SHARED_LIMIT, SMS

# A tile's accumulator is its rows times 512 values; beyond 32 rows ptxas spills on SM 90.
MAX_BLOCK_M = 32
APPEND_ROWS = 4


@dataclass(frozen=True)
class LatentTile:
    """group: query heads of one program; a tile holds block_m // group rows of the step."""

    block_m: int
    group: int
    block_n: int  # latents per step
    num_warps: int
    num_stages: int


def latent_tile(sm: int, rows: int, heads: int, *, selected: bool) -> LatentTile:
    """The tile for requests of ``rows`` rows. With a selection every row has keys of its own,
    so that only its heads share a tile.

    Raises:
        ValueError: an unknown SM.
    """
    if sm not in SHARED_LIMIT:
        raise ValueError(f"SM {sm} has no latent-attention tiles; known: {SMS}")
    group = max(n for n in range(1, MAX_BLOCK_M + 1) if heads % n == 0)
    wide = group * (1 if selected else rows) > 16
    # Queries stay in shared memory beside the latents in flight: two tiles of 32 do not fit
    # the smaller SMs then. Slots, pages and latents are loaded a step after one another, so
    # that 5 stages keep two tiles in flight.
    narrow_keys = wide and SHARED_LIMIT[sm] < 150_000
    return LatentTile(32 if wide else 16, group, 16 if narrow_keys else 32, 8, 5)
