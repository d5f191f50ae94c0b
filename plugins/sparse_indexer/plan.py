"""How a step's scores are shared out, see ``plugins/tree_attention/plan.py``."""

from collections.abc import Sequence

import torch

from trtree.plugins.sparse_indexer.tiles import IndexTile
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import AttentionPlan, plan_attention


def plan_scores(
    segments: Sequence[AttentionSegment],
    num_rows: int,
    tile: IndexTile,
    *,
    target_ctas: int,
    max_items: int | None = None,
) -> AttentionPlan:
    """A step's work items: tiles of rows times ranges of keys. Raises as plan_attention does."""
    return plan_attention(
        segments,
        num_rows,
        kv_heads=1,
        group=1,
        block_m=tile.rows,
        target_ctas=target_ctas,
        max_items=max_items,
    )


def row_lengths(segments: Sequence[AttentionSegment], num_rows: int) -> torch.Tensor:
    """int32 [rows]: the slots of each row's request; 0 for rows of none, which are padding."""
    lengths = torch.zeros(num_rows, dtype=torch.int32)
    for segment in segments:
        lengths[segment.rows] = segment.prefix_length + segment.num_rows
    return lengths
