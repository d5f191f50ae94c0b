"""Tree attention in obvious torch, float64 inside, rounded once: the oracle."""

from collections.abc import Sequence

import torch

from trtree.plugins.tree_attention.contract import E4M3_MAX, AttentionSegment, PagedKv, Rope


def kv_append(
    cache: PagedKv,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    segments: Sequence[AttentionSegment],
) -> None:
    """Write k, v [rows, kv_heads, head_dim] to each row's slot [rows] of its request.

    An FP8 cache stores x / scale, divided in float32, rounded to nearest even, saturated.
    """
    for segment in segments:
        where = cache.locate(segment.pages, slots[segment.rows].long())
        for store, scale, new in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
            values = new[segment.rows]
            if scale is not None:
                values = (values.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
            store[where] = values.to(store.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """RoPE on [rows, heads, head_dim] at int32 positions [rows], rounded once to x's dtype."""
    cos, sin = rope.cos_sin[positions.long()].double()[:, None].chunk(2, dim=-1)
    wide, rest = x[..., : rope.rotary_dim].double(), x[..., rope.rotary_dim :].double()
    if rope.interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = wide.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1).to(x.dtype)


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
    out, _ = tree_attention_with_lse(
        cache, q, packed_mask, positions, segments, scale=scale, window=window
    )
    return out.to(q.dtype)


def tree_attention_with_lse(
    cache: PagedKv,
    q: torch.Tensor,
    packed_mask: torch.Tensor,
    positions: torch.Tensor,
    segments: Sequence[AttentionSegment],
    *,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``tree_attention``, not rounded: float64 out and log-sum-exp [rows, heads]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for segment in segments:
        length = segment.prefix_length + segment.num_rows
        where = cache.locate(segment.pages, torch.arange(length))
        k = _values(cache.k, cache.k_scale, where)  # [length, kv_heads, head_dim]
        v = _values(cache.v, cache.v_scale, where)
        own = positions[segment.rows].long()
        visible = torch.ones(segment.num_rows, length, dtype=torch.bool)
        visible[:, segment.prefix_length :] = unpack_mask(
            packed_mask[segment.rows], segment.num_rows
        )
        if window is not None:
            key_positions = torch.cat([torch.arange(segment.prefix_length), own])
            visible &= key_positions[None, :] > own[:, None] - window
        group = q.shape[1] // k.shape[1]
        queries = q[segment.rows].double().reshape(-1, k.shape[1], group, q.shape[2])
        scores = torch.einsum("rhgd,shd->hgrs", queries, k) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = scores.softmax(dim=-1).masked_fill(~visible, 0.0)
        out[segment.rows] = torch.einsum("hgrs,shd->rhgd", weights, v).flatten(1, 2)
        lse[segment.rows] = scores.logsumexp(dim=-1).permute(2, 0, 1).flatten(1, 2)
    return out, lse


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


def _values(
    store: torch.Tensor, scale: torch.Tensor | None, where: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    values = store[where].double()
    return values if scale is None else values * scale.double()[:, None]
