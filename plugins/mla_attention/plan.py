"""How a step's latent attention is shared out, see ``plugins/tree_attention/plan.py``."""

from collections.abc import Sequence

from trtree.plugins.mla_attention.tiles import LatentTile
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import AttentionPlan, plan_attention


def plan_latent_attention(
    segments: Sequence[AttentionSegment],
    num_rows: int,
    *,
    heads: int,
    tile: LatentTile,
    target_ctas: int,
    top_k: int | None = None,
    max_items: int | None = None,
) -> AttentionPlan:
    """Cut a step into work items.

    Args:
        num_rows: rows of the step, padding rows included.
        target_ctas: CTAs the GPU runs at once (SMs times resident CTAs per SM).
        top_k: width of the selection; None: every visible key.
        max_items: most items allowed, such as a captured grid's.

    Raises:
        ValueError: max_items is below one per tile.
    """
    return plan_attention(
        segments,
        num_rows,
        kv_heads=heads // tile.group,
        group=tile.group,
        block_m=tile.block_m,
        target_ctas=target_ctas,
        top_k=top_k,
        max_items=max_items,
    )
