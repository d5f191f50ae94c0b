"""How a step's latent attention is shared out, see ``plugins/tree_attention/plan.py``."""

from collections.abc import Sequence

from trtree.plugins.mla_attention.tiles import LatentTile
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import AttentionPlan, cut_tiles, plan_attention


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
        top_k: width of the selection; a row's item is then a range of its list. None: every
            visible key, and an item is a range of slots.
        max_items: most items allowed, such as a captured grid's.

    Raises:
        ValueError: max_items is below one per tile.
    """
    blocks = heads // tile.group
    if top_k is None:
        return plan_attention(
            segments,
            num_rows,
            kv_heads=blocks,
            group=tile.group,
            block_m=tile.block_m,
            target_ctas=target_ctas,
            max_items=max_items,
        )
    tiles = [
        (index, segment, row, 1)
        for index, segment in enumerate(segments)
        for row in range(segment.num_rows)
    ]
    ranges = [
        (0, min(top_k, segment.prefix_length + segment.num_rows)) for _, segment, _, _ in tiles
    ]
    return cut_tiles(tiles, ranges, num_rows, max(target_ctas // blocks, 1), max_items)
