"""A paged cache of one vector per token: latents of attention, keys of an indexer.

As paged KV (``plugins/tree_attention/contract.py``), but one tensor instead of keys and values.
Rows of a step are written behind their request's committed prefix, row i into slot
``prefix_length + i``; commit moves the accepted ones right behind the prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.reference import unpack_mask


@dataclass(frozen=True)
class LatentCache:
    """One layer's cache: vectors [num_pages, page_size, dim]."""

    vectors: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.vectors.shape[1]

    def locate(self, pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """slots int64 [n] of a request with the page table ``pages`` -> (page, offset), each [n].

        Raises:
            IndexError: a slot lies behind the request's page table.
        """
        if len(slots) and int(slots.max()) >= len(pages) * self.page_size:
            raise IndexError(
                f"slot {int(slots.max())} is outside the request's {len(pages)} pages "
                f"of {self.page_size}"
            )
        return pages[slots // self.page_size], slots % self.page_size

    def read(self, segment: AttentionSegment) -> torch.Tensor:
        """float64 [prefix_length + num_rows, dim]: a request's prefix and its step's rows."""
        length = segment.prefix_length + segment.num_rows
        return self.vectors[self.locate(segment.pages, torch.arange(length))].double()


def append(
    cache: LatentCache,
    x: torch.Tensor,
    slots: torch.Tensor,
    segments: Sequence[AttentionSegment],
) -> None:
    """Write x [rows, dim] to each row's slot [rows] of its request."""
    for segment in segments:
        where = cache.locate(segment.pages, slots[segment.rows].long())
        cache.vectors[where] = x[segment.rows].to(cache.vectors.dtype)


def commit(cache: LatentCache, segment: AttentionSegment, rows: torch.Tensor) -> None:
    """Move the slots of the accepted rows [n] (increasing) right behind the prefix.

    Reads all before it writes any: source and destination overlap.
    """
    source = cache.locate(segment.pages, segment.prefix_length + rows)
    target = cache.locate(segment.pages, segment.prefix_length + torch.arange(len(rows)))
    cache.vectors[target] = cache.vectors[source]


def visible(packed_mask: torch.Tensor, segment: AttentionSegment) -> torch.Tensor:
    """bool [num_rows, prefix_length + num_rows]: by slot, what each row of a request sees: the
    whole prefix, and the rows of the step in its packed mask."""
    own = unpack_mask(packed_mask[segment.rows], segment.num_rows)
    prefix = torch.ones(segment.num_rows, segment.prefix_length, dtype=torch.bool)
    return torch.cat([prefix, own], dim=1)
