"""The ragged batch: positions by depth, masks by ancestry, one width for all segments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtree import _core


def parents_of(draw_from: list[int]) -> list[int]:
    """A random tree: row i continues one of the rows before it."""
    return [-1] + [value % row for row, value in enumerate(draw_from, start=1)]


def request(parents: list[int], committed: int = 0) -> _core.SegmentRequest:
    at = _core.Sequence(1, 0, committed, [])
    return _core.SegmentRequest(at, list(range(len(parents))), parents, [])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 31, 32, 33, 64, 65, 128, 129]),
            st.integers(0, 5000),
            st.randoms(use_true_random=False),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_masks_hold_ancestors_at_any_width(specs):
    trees = [(parents_of([r.randrange(1 << 30) for _ in range(n - 1)]), c) for n, c, r in specs]
    batch = _core.RowBatch([request(parents, committed) for parents, committed in trees])
    assert batch.mask_words == -(-max(n for n, _, _ in specs) // 32)
    words = batch.packed_mask.reshape(batch.num_rows, batch.mask_words).view(np.uint32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    for segment, (parents, committed) in zip(batch.segments, trees, strict=True):
        for row, parent in enumerate(parents):
            ancestors, at = {row}, parent
            while at >= 0:
                ancestors.add(at)
                at = parents[at]
            found = bits[segment.first_row + row]
            assert set(np.flatnonzero(found)) == ancestors
            assert batch.positions[segment.first_row + row] == committed + len(ancestors) - 1


@pytest.mark.parametrize(
    ("tokens", "parents", "outputs", "message"),
    [
        ([], [], [], "at least one row"),
        ([1, 2], [-1], [], "1 parents for 2 rows"),
        ([1, 2], [-1, 1], [], "row 1 has parent 1"),
        ([1], [-2], [], "row 0 has parent -2"),
        ([1, 2], [-1, 0], [1, 0], "output row 0 of 2"),
        ([1, 2], [-1, 0], [2], "output row 2 of 2"),
    ],
)
def test_malformed_segments_are_refused(tokens, parents, outputs, message):
    at = _core.Sequence(9, 0, 0, [])
    with pytest.raises(ValueError, match=f"request 9: .*{message}"):
        _core.RowBatch([_core.SegmentRequest(at, tokens, parents, outputs)])
