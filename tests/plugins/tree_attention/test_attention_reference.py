"""The reference itself, against torch's attention; and the shared table's coverage."""

import itertools
from dataclasses import replace

import pytest
import torch

from trtree.plugins.tree_attention import cases, reference
from trtree.plugins.tree_attention.cases import FACTORS, AttentionCase
from trtree.plugins.tree_attention.contract import PagedKv

CASE = AttentionCase(
    rows=37,
    context=50,
    page_size=16,
    group=4,
    requests=3,
    head_dim=64,
    dtype=torch.float16,
    fp8_kv=False,
    window=None,
    kv_heads=2,
)


def ancestors(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_reference_equals_torch_attention(window: int | None, fp8_kv: bool) -> None:
    """Row by row, on the keys that the tree names."""
    case = replace(CASE, window=window, fp8_kv=fp8_kv)
    x = cases.make_inputs(case)
    slots = torch.cat([s.prefix_length + torch.arange(s.num_rows) for s in x.segments])
    reference.kv_append(x.cache, x.k, x.v, slots, x.segments)
    out, lse = reference.tree_attention_with_lse(
        x.cache, x.q, x.packed_mask, x.positions, x.segments, scale=0.1, window=window
    )
    k_scale, v_scale = (
        torch.ones(2) if s is None else s for s in (x.cache.k_scale, x.cache.v_scale)
    )
    for segment, parents in zip(x.segments, x.parents, strict=True):
        for row in range(segment.num_rows):
            path = ancestors(parents, row)
            keys = {**{s: s for s in range(segment.prefix_length)}}
            keys |= {
                segment.prefix_length + r: segment.prefix_length + len(ancestors(parents, r)) - 1
                for r in path
            }
            position = segment.prefix_length + len(path) - 1
            seen = [s for s, p in keys.items() if window is None or position - p < window]
            page = segment.pages[torch.tensor(seen) // 16]
            where = page, torch.tensor(seen) % 16
            k = (x.cache.k[where].double() * k_scale[:, None]).repeat_interleave(4, dim=1)
            v = (x.cache.v[where].double() * v_scale[:, None]).repeat_interleave(4, dim=1)
            at = segment.first_row + row
            q = x.q[at].double()[:, None]
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k.transpose(0, 1), v.transpose(0, 1), scale=0.1
            )
            torch.testing.assert_close(out[at], expected[:, 0], rtol=0, atol=1e-9)
            scores = (q @ k.permute(1, 2, 0))[:, 0] * 0.1
            torch.testing.assert_close(lse[at], scores.logsumexp(-1), rtol=0, atol=1e-9)


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    x = cases.make_inputs(CASE)
    segments = [replace(x.segments[0], prefix_length=0)]
    nothing = torch.zeros_like(x.packed_mask)
    out, lse = reference.tree_attention_with_lse(
        x.cache, x.q, nothing, x.positions, segments, scale=1.0
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_fp8_caches_have_scales() -> None:
    k = torch.zeros(1, 1, 1, 64)
    with pytest.raises(ValueError, match="needs k_scale"):
        PagedKv(k.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="has no k_scale"):
        PagedKv(k, k, torch.ones(1), torch.ones(1))


def test_the_sample_covers_every_pair() -> None:
    sample = cases.pairwise_cases()
    assert sample == cases.pairwise_cases()
    for first, second in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, first), getattr(case, second)) for case in sample}
        assert met == set(itertools.product(FACTORS[first], FACTORS[second]))


def test_the_whole_table_has_every_size() -> None:
    names = [case.name for case in cases.all_cases()]
    assert len(set(names)) == len(names) == 6 * 5 * 4 * 3


def test_inputs_are_the_same_every_time() -> None:
    a, b = cases.make_inputs(CASE), cases.make_inputs(CASE)
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.cache.k, b.cache.k)
    assert a.parents == b.parents


def test_assert_rounded_names_the_worst_element() -> None:
    exact = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    cases.assert_rounded("x", exact.bfloat16(), exact + 1e-3, 0.0)
    with pytest.raises(AssertionError, match=r"x: 1 of 2 .* \(0, 1\): 2.5 instead of 2.0"):
        cases.assert_rounded("x", torch.tensor([[1.0, 2.5]]), exact, 0.1)
    with pytest.raises(AssertionError):
        cases.assert_rounded("x", torch.tensor([[torch.nan, 2.0]]), exact, 0.1)
