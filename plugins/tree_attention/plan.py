"""How a step's attention is shared out: tiles of rows times ranges of keys.

Built on the host once per step and used by every layer. A tile is as many rows as fit a
tensor-core tile together with the query heads of their group. A tile's keys are cut into
equal ranges so that the work items just fill the GPU: at 32k keys one CTA per tile and KV
head would leave most SMs idle; far more items than CTA slots would only add partial
results to write and merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtree.plugins.tree_attention.contract import AttentionSegment

# Below this many keys an item's own start-up and its partial result cost more than the
# keys; also the granularity of cuts, so that every cut but the last is whole blocks.
MIN_SPLIT_KEYS = 256
SPLIT_STEP = 128


# A request's number, the request, its first row in the tile, and how many.
Tile = tuple[int, AttentionSegment, int, int]


@dataclass(frozen=True)
class AttentionPlan:
    """work: int32 [items, 7], the fields at the top of kernels/attention.py.
    row_splits: int32 [rows, 3]: first item, number of items, row within the tile."""

    work: torch.Tensor
    row_splits: torch.Tensor

    @property
    def num_items(self) -> int:
        return len(self.work)

    def to(self, device: torch.device) -> "AttentionPlan":
        return AttentionPlan(self.work.to(device), self.row_splits.to(device))

    def padded(self, num_items: int) -> "AttentionPlan":
        """The same plan with idle items behind it: CUDA graphs fix the grid.

        Raises:
            ValueError: the plan has more items than that.
        """
        missing = num_items - self.num_items
        if missing < 0:
            raise ValueError(
                f"the attention plan has {self.num_items} work items, the captured grid "
                f"{num_items}; plan with max_items={num_items}"
            )
        return AttentionPlan(
            torch.nn.functional.pad(self.work, (0, 0, 0, missing)), self.row_splits
        )


@dataclass(frozen=True)
class RowTables:
    """Per row of the step, int32: slots [rows], requests [rows] (-1: padding), and
    page_table [requests, widest]; prefix_lengths [requests]."""

    slots: torch.Tensor
    requests: torch.Tensor
    page_table: torch.Tensor
    prefix_lengths: torch.Tensor

    def to(self, device: torch.device) -> "RowTables":
        moved = (self.slots, self.requests, self.page_table, self.prefix_lengths)
        return RowTables(*(tensor.to(device) for tensor in moved))


def row_tables(segments: Sequence[AttentionSegment], num_rows: int) -> RowTables:
    """What append and commit index by; rows of no segment are padding."""
    slots = torch.zeros(num_rows, dtype=torch.int32)
    requests = torch.full((num_rows,), -1, dtype=torch.int32)
    width = max(len(segment.pages) for segment in segments)
    page_table = torch.zeros(len(segments), width, dtype=torch.int32)
    for index, segment in enumerate(segments):
        slots[segment.rows] = segment.prefix_length + torch.arange(
            segment.num_rows, dtype=torch.int32
        )
        requests[segment.rows] = index
        page_table[index, : len(segment.pages)] = segment.pages.int()
    prefix = torch.tensor([segment.prefix_length for segment in segments], dtype=torch.int32)
    return RowTables(slots, requests, page_table, prefix)


def plan_attention(
    segments: Sequence[AttentionSegment],
    num_rows: int,
    *,
    kv_heads: int,
    group: int,
    block_m: int,
    target_ctas: int,
    window: int | None = None,
    top_k: int | None = None,
    max_items: int | None = None,
) -> AttentionPlan:
    """Cut a step into work items.

    Args:
        num_rows: rows of the step, padding rows included.
        block_m: rows of a tile, query heads of the group counted.
        target_ctas: CTAs the GPU runs at once (SMs times resident CTAs per SM).
        window: keys that no row of the request can see are left out.
        top_k: each row attends a list of so many keys of its own: an item is one row, and a
            range of its list. None: an item is a range of slots.
        max_items: most items allowed, such as a captured grid's.

    Raises:
        ValueError: one row's heads do not fit a tile, or max_items is below one per tile.
    """
    if group > block_m:
        raise ValueError(f"a group of {group} query heads does not fit a tile of {block_m} rows")
    rows = block_m // group if top_k is None else 1
    tiles = [
        (index, segment, first, min(rows, segment.num_rows - first))
        for index, segment in enumerate(segments)
        for first in range(0, segment.num_rows, rows)
    ]
    ranges = [_key_range(segment, window) for _, segment, _, _ in tiles]
    if top_k is not None:
        ranges = [(0, min(top_k, end)) for _, end in ranges]
    return _cut_tiles(tiles, ranges, num_rows, max(target_ctas // kv_heads, 1), max_items)


def _cut_tiles(
    tiles: Sequence[Tile],
    ranges: Sequence[tuple[int, int]],
    num_rows: int,
    target_items: int,
    max_items: int | None,
) -> AttentionPlan:
    """Cut each tile's range of keys [begin, end) so that about ``target_items`` items result.

    Raises:
        ValueError: max_items is below one per tile.
    """
    if max_items is not None:
        if max_items < len(tiles):
            raise ValueError(f"{len(tiles)} tiles of rows do not fit {max_items} work items")
        target_items = min(target_items, max_items)
    split = _split_size([end - begin for begin, end in ranges], max(target_items, len(tiles)))

    work: list[tuple[int, ...]] = []
    row_splits = torch.zeros(num_rows, 3, dtype=torch.int32)
    for (index, segment, first, rows), (begin, end) in zip(tiles, ranges, strict=True):
        tile_row = segment.first_row + first
        starts = range(begin, end, split)
        row_splits[tile_row : tile_row + rows, 0] = len(work)
        row_splits[tile_row : tile_row + rows, 1] = len(starts)
        row_splits[tile_row : tile_row + rows, 2] = torch.arange(rows, dtype=torch.int32)
        work += [
            (
                index,
                tile_row,
                rows,
                segment.first_row,
                segment.prefix_length,
                start,
                min(start + split, end),
            )
            for start in starts
        ]
    return AttentionPlan(torch.tensor(work, dtype=torch.int32).reshape(-1, 7), row_splits)


def _key_range(segment: AttentionSegment, window: int | None) -> tuple[int, int]:
    """Slots that some row of the request may see; positions never precede the prefix's end."""
    first = 0 if window is None else max(segment.prefix_length - window + 1, 0)
    return first // SPLIT_STEP * SPLIT_STEP, segment.prefix_length + segment.num_rows


def _split_size(lengths: list[int], limit: int) -> int:
    """The smallest range size that makes at most ``limit`` items (limit >= len(lengths))."""

    def items(steps: int) -> int:
        return sum(-(-length // (steps * SPLIT_STEP)) for length in lengths)

    low = MIN_SPLIT_KEYS // SPLIT_STEP
    high = max(low, -(-max(lengths, default=0) // SPLIT_STEP))
    while low < high:  # items() does not grow with steps
        middle = (low + high) // 2
        if items(middle) <= limit:
            high = middle
        else:
            low = middle + 1
    return low * SPLIT_STEP
