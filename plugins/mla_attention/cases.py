"""The shared test table of latent attention and of the indexer before it.

A case is a handful of numbers; ``make_inputs`` turns it into tensors, the same ones on every
machine.
"""

import random
from dataclasses import dataclass

import torch

from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.tree_attention.cases import (
    depths,
    make_segments,
    normal_values,
    pack_mask,
    random_tree,
    segment_sizes,
)
from trtree.plugins.tree_attention.contract import AttentionSegment

# Of pages that belong to nobody: a read through a wrong page shows.
_NOBODY = 6e4


@dataclass(frozen=True)
class LatentCase:
    """Request i of a batch has rows // (i + 1) rows (at least 1) behind context // (i + 1)
    committed tokens. dim is that of the latents, index_dim of the indexer's keys."""

    rows: int = 17
    context: int = 40
    page_size: int = 16
    requests: int = 2
    heads: int = 4
    dim: int = 48
    value_dim: int = 32
    index_heads: int = 16
    index_dim: int = 32
    top_k: int = 24
    dtype: torch.dtype = torch.float32
    tree: bool = True  # else every request's rows are a chain

    @property
    def seed(self) -> int:
        values = (self.rows, self.context, self.page_size, self.requests, self.heads, self.dim)
        return sum(value * 31**power for power, value in enumerate((*values, self.top_k)))

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def segment_sizes(self) -> list[tuple[int, int]]:
        return segment_sizes(self.rows, self.context, self.requests)


@dataclass(frozen=True)
class LatentInputs:
    """A case as tensors. The caches hold the prefixes; the step's own latents [rows, dim] and
    index_keys [rows, index_dim] are still to be appended at ``slots``."""

    q: torch.Tensor  # [rows, heads, dim]
    latents: torch.Tensor
    index_q: torch.Tensor  # [rows, index_heads, index_dim]
    index_weights: torch.Tensor  # float32 [rows, index_heads]
    index_keys: torch.Tensor
    cache: LatentCache
    index_cache: LatentCache
    segments: list[AttentionSegment]
    parents: list[list[int]]  # per request, -1: the committed prefix
    packed_mask: torch.Tensor
    positions: torch.Tensor  # int32 [rows]
    slots: torch.Tensor  # int64 [rows]


def make_inputs(case: LatentCase) -> LatentInputs:
    """Random trees, shuffled pages, random values; deterministic in the case."""
    generator = torch.Generator().manual_seed(case.seed)
    rng = random.Random(case.seed)
    sizes = case.segment_sizes
    num_rows = sum(rows for rows, _ in sizes)
    segments = make_segments(sizes, case.page_size, rng)
    parents = [
        random_tree(rows, rng) if case.tree else list(range(-1, rows - 1)) for rows, _ in sizes
    ]
    words = (max(rows for rows, _ in sizes) + 31) // 32
    randn = normal_values(generator, case.dtype)

    def cache(dim: int) -> LatentCache:
        num_pages = sum(len(segment.pages) for segment in segments) + 2
        filled = LatentCache(torch.full((num_pages, case.page_size, dim), _NOBODY).to(case.dtype))
        for segment in segments:
            where = filled.locate(segment.pages, torch.arange(segment.prefix_length))
            filled.vectors[where] = randn(segment.prefix_length, dim)
        return filled

    below = zip(segments, parents, strict=True)
    return LatentInputs(
        q=randn(num_rows, case.heads, case.dim),
        latents=randn(num_rows, case.dim),
        index_q=randn(num_rows, case.index_heads, case.index_dim),
        index_weights=randn(num_rows, case.index_heads).float(),
        index_keys=randn(num_rows, case.index_dim),
        cache=cache(case.dim),
        index_cache=cache(case.index_dim),
        segments=segments,
        parents=parents,
        packed_mask=torch.cat([pack_mask(tree, words) for tree in parents]),
        positions=torch.cat(
            [s.prefix_length + torch.tensor(depths(tree)) for s, tree in below]
        ).int(),
        slots=torch.cat([s.prefix_length + torch.arange(s.num_rows) for s in segments]),
    )
