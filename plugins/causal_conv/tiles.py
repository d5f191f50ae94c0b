"""Tile sizes, never yet chosen by measurement."""

ROWS = 8
CHANNELS = 128  # 16 bytes of bf16 for each of a quarter of the threads, twice
COMMIT_CHANNELS = 256
