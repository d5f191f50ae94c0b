"""The append, attention, combine and commit kernels, interpreted, against the reference."""

from dataclasses import replace

import pytest
import torch

from trtree.plugins.tree_attention import cases, launch, plan
from trtree.plugins.tree_attention.cases import AttentionCase
from trtree.plugins.tree_attention.contract import Rope
from trtree.plugins.tree_attention.device_checks import (
    check_append,
    check_attention,
    check_commit,
)
from trtree.plugins.tree_attention.tiles import Tile, attention_tile

CPU = torch.device("cpu")
# Interpreted products are float32 throughout, so nothing rounds a softmax weight.
FLOAT32_ERROR = 4e-6

SMALL = AttentionCase(
    rows=17,
    context=40,
    page_size=16,
    group=4,
    requests=2,
    head_dim=64,
    dtype=torch.bfloat16,
    fp8_kv=False,
    window=None,
    kv_heads=2,
)


def check(case: AttentionCase) -> None:
    inputs = cases.make_inputs(case)
    # Many rows per program: interpreted, a program's cost hardly grows with them.
    q, cache = check_append(inputs, CPU, rows_per_program=32)
    tile = attention_tile(120, case.head_dim, case.rows, case.group)
    check_attention(case, inputs, q, cache, tile, CPU, target_ctas=8, weight_error=FLOAT32_ERROR)
    check_commit(case, inputs, CPU)


@pytest.mark.parametrize("case", cases.pairwise_cases(), ids=lambda case: case.name)
def test_kernels_equal_the_reference(case: AttentionCase) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases.all_cases(), ids=lambda case: case.name)
def test_kernels_equal_the_reference_on_the_whole_table(case: AttentionCase) -> None:
    check(case)


@pytest.mark.parametrize("rotary_dim", [0, 32, 48])
@pytest.mark.parametrize("interleaved", [False, True])
def test_append_of_partial_and_interleaved_rope(rotary_dim: int, interleaved: bool) -> None:
    case = replace(SMALL, rows=5)
    inputs = cases.make_inputs(case)
    if rotary_dim:
        rope = cases.rope_table(rotary_dim, case.context + case.rows)
        check_append(replace(inputs, rope=Rope(rope.cos_sin, interleaved)), CPU)
    else:
        tables = plan.row_tables(inputs.segments, len(inputs.q))
        q = launch.append(
            inputs.q, inputs.k, inputs.v, inputs.positions, tables, inputs.cache, None
        )
        assert q is inputs.q
        where = inputs.cache.locate(inputs.segments[0].pages, tables.slots[:5].long())
        assert torch.equal(inputs.cache.k[where], inputs.k[:5])


def test_append_skips_padding_rows() -> None:
    inputs = cases.make_inputs(SMALL)
    tables = plan.row_tables(inputs.segments[:1], len(inputs.q))
    before = inputs.cache.k.clone()
    launch.append(inputs.q, inputs.k, inputs.v, inputs.positions, tables, inputs.cache, inputs.rope)
    other = inputs.segments[1].pages
    assert torch.equal(inputs.cache.k[other], before[other])


@pytest.mark.parametrize("target_ctas", [1, 8, 64])
def test_the_number_of_splits_does_not_matter(target_ctas: int) -> None:
    case = replace(SMALL, context=1000, requests=3, head_dim=128, fp8_kv=True)
    inputs = cases.make_inputs(case)
    q, cache = check_append(inputs, CPU, rows_per_program=32)
    tile = attention_tile(120, case.head_dim, case.rows, case.group)
    check_attention(
        case, inputs, q, cache, tile, CPU, target_ctas=target_ctas, weight_error=FLOAT32_ERROR
    )


@pytest.mark.parametrize("block_m", [16, 32])
def test_rows_in_several_tiles_and_an_odd_group(block_m: int) -> None:
    case = replace(SMALL, group=3, rows=33)
    inputs = cases.make_inputs(case)
    q, cache = check_append(inputs, CPU, rows_per_program=32)
    check_attention(
        case,
        inputs,
        q,
        cache,
        Tile(block_m, 64, 4, 2),
        CPU,
        target_ctas=8,
        weight_error=FLOAT32_ERROR,
    )


def test_a_range_may_begin_among_the_steps_own_rows() -> None:
    """A prefill chunk is cut past its prefix too, away from a word's boundary."""
    case = replace(SMALL, rows=300, context=9, group=1, kv_heads=1, requests=1)
    inputs = cases.make_inputs(case)
    q, cache = check_append(inputs, CPU, rows_per_program=64)
    tile = attention_tile(120, case.head_dim, case.rows, case.group)
    check_attention(case, inputs, q, cache, tile, CPU, target_ctas=64, weight_error=FLOAT32_ERROR)


def test_padding_rows_give_zeros() -> None:
    inputs = cases.make_inputs(SMALL)
    tile = attention_tile(120, SMALL.head_dim, SMALL.rows, SMALL.group)
    segments = inputs.segments[:1]
    tables = plan.row_tables(segments, len(inputs.q))
    table = plan.plan_attention(
        segments, len(inputs.q), kv_heads=2, group=4, block_m=tile.block_m, target_ctas=8
    ).padded(5)
    out, lse = launch.tree_attention(
        inputs.q,
        inputs.packed_mask,
        inputs.positions,
        table,
        tables.page_table,
        inputs.cache,
        tile,
        scale=1.0,
    )
    assert (out[17:] == 0).all()
    assert (lse[17:] == -torch.inf).all()
    assert torch.isfinite(lse[:17]).all()


def test_commit_refuses_layers_of_different_shapes() -> None:
    a, b = (cases.make_inputs(replace(SMALL, head_dim=d)).cache for d in (64, 128))
    with pytest.raises(ValueError, match="KV caches differ"):
        launch.KvStores.of([a, b])
