"""Latent attention in obvious torch, float64 inside, rounded once: the oracle.

Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2):
with the keys' up-projection in the queries and the values' behind the sum, all heads attend
one vector per token, whose first part is also its value.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from trtree.plugins.latent_cache import LatentCache, visible
from trtree.plugins.mla_attention.contract import check_operands
from trtree.plugins.tree_attention.contract import AttentionSegment


def latent_attention(
    cache: LatentCache,
    q: torch.Tensor,
    packed_mask: torch.Tensor,
    segments: Sequence[AttentionSegment],
    selection: torch.Tensor | None,
    *,
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    """q [rows, heads, dim] -> [rows, heads, value_dim] in q's dtype.

    packed_mask: int32 [rows, words]. selection: int32 [rows, top_k] from ``index_select``, -1
    behind a row's slots; None: every visible key.
    """
    out, _ = latent_attention_with_lse(
        cache, q, packed_mask, segments, selection, value_dim=value_dim, scale=scale
    )
    return out.to(q.dtype)


def latent_attention_with_lse(
    cache: LatentCache,
    q: torch.Tensor,
    packed_mask: torch.Tensor,
    segments: Sequence[AttentionSegment],
    selection: torch.Tensor | None,
    *,
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``latent_attention``, not rounded: float64 out, and the natural log-sum-exp
    [rows, heads]. A row that attends nothing gives 0 and -inf."""
    check_operands(q, cache.vectors.shape[2], value_dim, selection)
    out = torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for segment in segments:
        latents = cache.read(segment)
        attended = visible(packed_mask, segment)
        if selection is not None:
            attended &= chosen(selection[segment.rows], len(latents))
        scores = torch.einsum("rhd,sd->rhs", q[segment.rows].double(), latents) * scale
        hidden = ~attended[:, None, :]
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(dim=-1).masked_fill(hidden, 0.0)
        out[segment.rows] = torch.einsum("rhs,sd->rhd", weights, latents[:, :value_dim])
        lse[segment.rows] = scores.logsumexp(dim=-1)
    return out, lse


def chosen(selection: torch.Tensor, length: int) -> torch.Tensor:
    """int32 [rows, top_k] of slots below ``length`` -> bool [rows, length]; -1 is none.

    Raises:
        IndexError: a slot is not below ``length``.
    """
    if selection.numel() and int(selection.max()) >= length:
        raise IndexError(f"a selection names slot {int(selection.max())} of {length}")
    marks = torch.zeros(len(selection), length + 1, dtype=torch.bool)
    slots = torch.where(selection < 0, length, selection.long())  # -1 lands in a column of its own
    return marks.scatter_(1, slots, True)[:, :length]


def head_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    part: Literal["key", "value"],
    *,
    key_dim: int,
    value_dim: int,
) -> torch.Tensor:
    """x [rows, heads, in] -> float64 [rows, heads, out] by one part of each head's matrix.

    weight: [heads * (key_dim + value_dim), latent], a head's key rows before its value rows.
    The part "key" turns key_dim numbers into a latent, "value" a latent into value_dim.
    """
    matrices = weight.double().reshape(x.shape[1], key_dim + value_dim, -1)
    if part == "key":
        return torch.einsum("rhi,hio->rho", x.double(), matrices[:, :key_dim])
    return torch.einsum("rhi,hoi->rho", x.double(), matrices[:, key_dim:])
