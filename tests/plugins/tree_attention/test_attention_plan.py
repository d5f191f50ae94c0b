"""Plans: every row meets every key it may see exactly once, in at most so many items."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import AttentionPlan, plan_attention, row_tables


def segments_of(sizes: list[tuple[int, int]]) -> list[AttentionSegment]:
    segments = []
    first = 0
    for rows, prefix in sizes:
        segments.append(AttentionSegment(first, rows, prefix, torch.arange(3)))
        first += rows
    return segments


def plan_of(sizes: list[tuple[int, int]], **options: int | None) -> AttentionPlan:
    defaults: dict[str, int | None] = {
        "kv_heads": 2,
        "group": 4,
        "block_m": 64,
        "target_ctas": 100,
    }
    chosen: dict[str, int | None] = {**defaults, **options}
    return plan_attention(segments_of(sizes), sum(rows for rows, _ in sizes), **chosen)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 5000)), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 8]),
    target_ctas=st.integers(1, 400),
    window=st.sampled_from([None, 1, 100, 9999]),
)
def test_every_row_meets_its_keys_once(
    sizes: list[tuple[int, int]], group: int, target_ctas: int, window: int | None
) -> None:
    plan = plan_of(sizes, group=group, target_ctas=target_ctas, window=window)
    for index, segment in enumerate(segments_of(sizes)):
        for row in range(segment.num_rows):
            first, count, lane = plan.row_splits[segment.first_row + row].tolist()
            items = plan.work[first : first + count].tolist()
            assert all(item[0] == index for item in items)
            assert all(item[3:5] == [segment.first_row, segment.prefix_length] for item in items)
            assert all(item[1] + lane == segment.first_row + row for item in items)
            assert all(lane < item[2] <= 64 // group for item in items)
            ranges = [item[5:7] for item in items]
            assert ranges[-1][1] == segment.prefix_length + segment.num_rows
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            first_visible = 0 if window is None else segment.prefix_length - window + 1
            assert ranges[0][0] <= max(first_visible, 0)


def test_a_long_context_fills_the_gpu_and_no_more() -> None:
    plan = plan_of([(17, 32768)], kv_heads=8, target_ctas=2 * 188, block_m=128)
    assert 0.8 * 376 / 8 <= plan.num_items <= 376 / 8


def test_short_contexts_are_not_split() -> None:
    assert plan_of([(4, 200), (4, 100)], target_ctas=10_000).num_items == 2


def test_a_window_leaves_out_what_nobody_sees() -> None:
    plan = plan_of([(4, 10_000)], window=256, target_ctas=1)
    assert plan.work[0, 5:].tolist() == [9744 // 128 * 128, 10_004]


def test_padding_to_a_captured_grid() -> None:
    plan = plan_of([(4, 1000)], target_ctas=4)
    padded = plan.padded(9)
    assert padded.num_items == 9
    assert (padded.work[plan.num_items :, 2] == 0).all()
    with pytest.raises(ValueError, match="captured grid"):
        padded.padded(8)


def test_max_items_bounds_the_plan() -> None:
    assert plan_of([(4, 9000), (4, 9000)], max_items=5).num_items <= 5
    with pytest.raises(ValueError, match="do not fit 1 work items"):
        plan_of([(4, 9000), (4, 9000)], max_items=1)


def test_a_group_larger_than_the_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="group of 96"):
        plan_of([(1, 1)], group=96)


def test_row_tables() -> None:
    tables = row_tables(segments_of([(2, 10), (1, 4)]), 5)
    assert tables.slots.tolist() == [10, 11, 4, 0, 0]
    assert tables.requests.tolist() == [0, 0, 1, -1, -1]
    assert tables.prefix_lengths.tolist() == [10, 4]
    assert tables.page_table.tolist() == [[0, 1, 2], [0, 1, 2]]
