"""The indexer's reference: by hand, by a naive loop, and a tree row against its path alone."""

from dataclasses import replace

import pytest
import torch

from trtree.plugins import latent_cache
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.mla_attention.cases import LatentCase, LatentInputs, make_inputs
from trtree.plugins.sparse_indexer.reference import index_select
from trtree.plugins.tree_attention.contract import AttentionSegment


def path_of(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def select(x: LatentInputs, top_k: int) -> torch.Tensor:
    latent_cache.append(x.index_cache, x.index_keys, x.slots, x.segments)
    return index_select(
        x.index_cache, x.index_q, x.index_weights, x.packed_mask, x.segments, top_k=top_k
    )


def one_request(keys: list[list[float]], rows: int) -> tuple[LatentCache, AttentionSegment]:
    """Keys by slot, the last ``rows`` of them the step's."""
    cache = LatentCache(torch.tensor(keys)[:, None])
    return cache, AttentionSegment(0, rows, len(keys) - rows, torch.arange(len(keys)))


def test_by_hand() -> None:
    """Two heads: scores 2 relu(k0) - relu(k1), scaled; the row sees slots 0 to 3 and itself."""
    keys = [[1.0, 0.0], [3.0, 5.0], [-4.0, -4.0], [2.0, 9.0], [1.0, 1.0]]  # 2, 1, 0, -5, 1
    cache, segment = one_request(keys, 1)
    q = torch.eye(2)[None]
    weights = torch.tensor([[2.0, -1.0]])
    mask = torch.ones(1, 1, dtype=torch.int32)

    def chosen(top_k: int) -> list[int]:
        return index_select(cache, q, weights, mask, [segment], top_k=top_k)[0].tolist()

    assert chosen(1) == [0]
    assert chosen(2) == [0, 1]  # of the equal slots 1 and 4 the lower
    assert chosen(3) == [0, 1, 4]
    assert chosen(4) == [0, 1, 2, 4]
    assert chosen(7) == [0, 1, 2, 3, 4, -1, -1]


def test_siblings_are_hidden_before_the_choice() -> None:
    """Rows 1 and 2 are siblings of large scores: neither takes the other's place."""
    cache, segment = one_request([[1.0], [2.0], [0.5], [9.0], [9.0]], 3)
    mask = torch.tensor([[0b001], [0b011], [0b101]], dtype=torch.int32)
    ones = torch.ones(3, 1)
    got = index_select(cache, ones[..., None], ones, mask, [segment], top_k=2)
    assert got.tolist() == [[0, 1], [1, 3], [1, 4]]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("top_k", [1, 24, 200])
def test_a_tree_row_chooses_what_its_path_alone_does(page_size: int, top_k: int) -> None:
    x = make_inputs(LatentCase(rows=33, page_size=page_size, dtype=torch.float64))
    got = select(x, top_k)
    for segment, parents in zip(x.segments, x.parents, strict=True):
        prefix = segment.prefix_length
        for row in range(segment.num_rows):
            path = path_of(parents, row)
            slots = torch.tensor([*range(prefix), *(prefix + r for r in path)])
            alone = LatentCache(
                x.index_cache.vectors[x.index_cache.locate(segment.pages, slots)][:, None]
            )
            at = segment.first_row + row
            last = AttentionSegment(0, 1, len(slots) - 1, torch.arange(len(slots)))
            expected = index_select(
                alone,
                x.index_q[at : at + 1],
                x.index_weights[at : at + 1],
                torch.ones(1, 1, dtype=torch.int32),
                [last],
                top_k=top_k,
            )[0]
            expected = torch.where(expected < 0, -1, slots[expected.long()].int())
            assert got[at].tolist() == expected.tolist()
            assert (got[at] >= 0).sum() == min(top_k, len(slots))


def test_nan_names_the_row_unless_nobody_sees_it() -> None:
    x = make_inputs(LatentCase(rows=5, tree=False))
    x.index_keys[3] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN in the scores of row 3"):
        select(x, 4)
    cache, segment = one_request([[1.0], [2.0], [torch.nan]], 2)
    mask = torch.tensor([[1], [1]], dtype=torch.int32)
    ones = torch.ones(2, 1)
    assert index_select(cache, ones[..., None], ones, mask, [segment], top_k=1).tolist() == [
        [1],
        [1],
    ]


def test_operands_are_checked() -> None:
    x = make_inputs(LatentCase())
    with pytest.raises(ValueError, match=r"keys of 32, top_k 0"):
        select(x, 0)
    with pytest.raises(ValueError, match=r"weights \[\d+, 15\]"):
        select(replace(x, index_weights=x.index_weights[:, 1:]), 4)
