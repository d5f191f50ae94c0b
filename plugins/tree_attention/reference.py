"""Tree attention in obvious torch, float64 inside, rounded once: the oracle."""

from collections.abc import Sequence

import torch

from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv


def kv_append(
    cache: PagedKv,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    segments: Sequence[AttentionSegment],
) -> None:
    """Write k, v [rows, kv_heads, head_dim] to each row's slot [rows] of its request."""
    for segment in segments:
        where = cache.locate(segment.pages, slots[segment.rows].long())
        cache.k[where] = k[segment.rows].to(cache.k.dtype)
        cache.v[where] = v[segment.rows].to(cache.v.dtype)


def tree_attention(
    cache: PagedKv,
    q: torch.Tensor,
    packed_mask: torch.Tensor,
    positions: torch.Tensor,
    segments: Sequence[AttentionSegment],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """q [rows, heads, head_dim] -> [rows, heads, head_dim] in q's dtype.

    packed_mask: int32 [rows, words]; positions: int32 [rows], by depth, not by slot.
    With ``window``, a key at position p is seen from position t only if p > t - window.
    """
    out = torch.empty_like(q)
    for segment in segments:
        length = segment.prefix_length + segment.num_rows
        where = cache.locate(segment.pages, torch.arange(length))
        k, v = cache.k[where].double(), cache.v[where].double()  # [length, kv_heads, head_dim]
        own = positions[segment.rows].long()
        visible = torch.ones(segment.num_rows, length, dtype=torch.bool)
        visible[:, segment.prefix_length :] = unpack_mask(
            packed_mask[segment.rows], segment.num_rows
        )
        if window is not None:
            key_positions = torch.cat([torch.arange(segment.prefix_length), own])
            visible &= key_positions[None, :] > own[:, None] - window
        group = q.shape[1] // k.shape[1]
        queries = q[segment.rows].double().reshape(-1, k.shape[1], group, k.shape[2])
        scores = torch.einsum("rhgd,shd->hgrs", queries, k) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        attended = torch.einsum("hgrs,shd->rhgd", scores.softmax(dim=-1), v)
        out[segment.rows] = attended.flatten(1, 2).to(q.dtype)
    return out


def commit(cache: PagedKv, segment: AttentionSegment, rows: torch.Tensor) -> None:
    """Move the slots of the accepted rows [n] (increasing) right behind the prefix.

    Reads all before it writes any: source and destination overlap.
    """
    source = cache.locate(segment.pages, segment.prefix_length + rows)
    target = cache.locate(segment.pages, segment.prefix_length + torch.arange(len(rows)))
    k, v = cache.k[source], cache.v[source]
    cache.k[target], cache.v[target] = k, v


def unpack_mask(packed_mask: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int32 [n, words], LSB first -> bool [n, num_rows]."""
    bits = torch.arange(num_rows)
    words = packed_mask[:, bits // 32].long() & 0xFFFFFFFF
    return (words >> (bits % 32)) & 1 == 1
