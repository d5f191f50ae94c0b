"""The indexer's choice in obvious torch, float64 inside: the oracle.

DeepSeek sparse attention (DeepSeek-V3.2, section 2.1, equation 1): a key's score is
sum over heads of w_h relu(q_h . k); a row attends the ``top_k`` visible keys of largest score.
"""

from collections.abc import Sequence

import torch

from trtree.plugins.latent_cache import LatentCache, visible
from trtree.plugins.sparse_indexer.contract import NONE, check_operands, score_scale
from trtree.plugins.tree_attention.contract import AttentionSegment


def index_select(
    cache: LatentCache,
    q: torch.Tensor,
    weights: torch.Tensor,
    packed_mask: torch.Tensor,
    segments: Sequence[AttentionSegment],
    *,
    top_k: int,
) -> torch.Tensor:
    """q [rows, index_heads, dim], weights [rows, index_heads] -> int32 [rows, top_k].

    The chosen keys' slots in their request's cache in rising order, then -1. The cache holds
    the rows' own keys already.

    Raises:
        FloatingPointError: a row sees more than ``top_k`` keys, and the score of one is NaN.
    """
    check_operands(q, weights, cache.vectors.shape[2], top_k)
    selection = torch.full((len(q), top_k), NONE, dtype=torch.int32)
    for segment in segments:
        scores = index_scores(cache, q, weights, segment)
        seen = visible(packed_mask, segment)
        for row in range(segment.num_rows):
            slots = seen[row].nonzero().flatten()
            of_row = scores[row, slots]
            if len(slots) > top_k and of_row.isnan().any():
                raise FloatingPointError(
                    f"index_select: NaN in the scores of row {segment.first_row + row}; "
                    "a weight or an activation overflowed"
                )
            # Stable, and slots rise: of equal scores the lower slot comes first.
            order = torch.sort(of_row, descending=True, stable=True).indices[:top_k]
            chosen = slots[order].sort().values
            selection[segment.first_row + row, : len(chosen)] = chosen.int()
    return selection


def index_scores(
    cache: LatentCache, q: torch.Tensor, weights: torch.Tensor, segment: AttentionSegment
) -> torch.Tensor:
    """float64 [num_rows, prefix_length + num_rows]: of one request, by slot, visible or not."""
    keys = cache.read(segment)
    products = torch.einsum("rhd,sd->rhs", q[segment.rows].double(), keys).relu()
    scores = torch.einsum("rh,rhs->rs", weights[segment.rows].double(), products)
    return scores * score_scale(q.shape[1], q.shape[2])
