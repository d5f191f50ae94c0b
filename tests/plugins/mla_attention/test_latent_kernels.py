"""The kernels of latent attention and of its indexer, interpreted, against the references."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from trtree.plugins.mla_attention import launch
from trtree.plugins.mla_attention.cases import LatentCase, make_inputs
from trtree.plugins.mla_attention.device_checks import (
    assert_stable_choice,
    check_append,
    check_attention,
    check_commit,
    check_select,
)
from trtree.plugins.mla_attention.plan import plan_latent_attention
from trtree.plugins.mla_attention.tiles import LatentTile, latent_tile
from trtree.plugins.sparse_indexer import launch as indexer
from trtree.plugins.sparse_indexer.plan import row_lengths
from trtree.plugins.sparse_indexer.tiles import index_tile
from trtree.plugins.tree_attention.cases import pairwise
from trtree.plugins.tree_attention.plan import row_tables

CPU = torch.device("cpu")
# Interpreted products are float32 throughout, so nothing rounds a softmax weight.
FLOAT32_ERROR = 4e-6

FACTORS: dict[str, tuple[Any, ...]] = {
    "rows": (1, 9, 33),
    "context": (0, 127, 300),
    "page_size": (1, 16, 64),
    "requests": (1, 3),
    "heads": (1, 6, 40),
    "index_heads": (1, 6),
    # Shorter and longer than what the rows see.
    "top_k": (1, 50, 2048),
    "dtype": (torch.bfloat16, torch.float16),
    "dims": ((48, 32), (40, 24)),
}


def cases() -> list[LatentCase]:
    def cost(choice: dict[str, Any]) -> float:
        """Programs and steps rather than products: what the interpreter takes."""
        keys = choice["rows"] + choice["context"]
        return float(choice["rows"] * choice["requests"] * min(keys, choice["top_k"])) / 4_000

    sample = pairwise(FACTORS, cost)
    dims = [dict(zip(("dim", "value_dim"), choice.pop("dims"), strict=True)) for choice in sample]
    return [LatentCase(**choice, **dim) for choice, dim in zip(sample, dims, strict=True)]


def case_name(case: LatentCase) -> str:
    return (
        f"rows{case.rows}-ctx{case.context}-page{case.page_size}-b{case.requests}"
        f"-h{case.heads}-{case.index_heads}-k{case.top_k}-d{case.dim}"
    )


def check(case: LatentCase, block_n: int | None = 256, block: int = 1024) -> None:
    """block_n: keys per step; interpreted, a step's cost hardly grows with them. None: those
    of the compiled kernels."""
    inputs = make_inputs(case)
    q, cache = check_append(case, inputs, CPU, rows_per_program=64)
    choosing = index_tile(120, case.rows, case.index_heads)
    choosing = replace(choosing, block_n=block_n or choosing.block_n)
    selection = check_select(
        case, inputs, choosing, CPU, target_ctas=4, block=block, score_error=1e-6
    )
    for chosen in (None, selection):
        tile = latent_tile(120, case.rows, case.heads, selected=chosen is not None)
        check_attention(
            case,
            inputs,
            q,
            cache,
            chosen,
            replace(tile, block_n=block_n or tile.block_n),
            CPU,
            target_ctas=8,
            weight_error=FLOAT32_ERROR,
        )
    check_commit(case, inputs, CPU)


@pytest.mark.parametrize("case", cases(), ids=case_name)
def test_kernels_equal_the_references(case: LatentCase) -> None:
    check(case)


@pytest.mark.parametrize(
    ("rows", "context", "top_k", "page_size"), [(129, 9, 40, 16), (9, 1000, 2048, 64)]
)
def test_large_trees_and_long_contexts(rows: int, context: int, top_k: int, page_size: int) -> None:
    case = LatentCase(rows, context, page_size, requests=1, top_k=top_k, dtype=torch.bfloat16)
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tiles_that_are_compiled(dtype: torch.dtype) -> None:
    check(LatentCase(rows=5, context=70, heads=64, top_k=40, dtype=dtype), block_n=None, block=32)


def test_dimensions_of_glm_5() -> None:
    case = LatentCase(
        rows=3,
        context=60,
        heads=64,
        dim=576,
        value_dim=512,
        index_heads=32,
        index_dim=128,
        top_k=40,
        dtype=torch.bfloat16,
    )
    check(case, block_n=None)


@pytest.mark.parametrize("target_ctas", [1, 64])
@pytest.mark.parametrize("top_k", [None, 600])
def test_the_number_of_splits_does_not_matter(target_ctas: int, top_k: int | None) -> None:
    case = LatentCase(rows=4, context=900, requests=1, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    q, cache = check_append(case, inputs, CPU, rows_per_program=64)
    selection = None
    if top_k is not None:
        selection = torch.arange(300, 900, dtype=torch.int32).expand(4, 600).contiguous()
    tile = LatentTile(16, 4, 256, 8, 2)
    check_attention(
        case,
        inputs,
        q,
        cache,
        selection,
        tile,
        CPU,
        target_ctas=target_ctas,
        weight_error=FLOAT32_ERROR,
    )


def test_padding_rows_and_idle_items() -> None:
    case = LatentCase(rows=9, context=20, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    segments = inputs.segments[:1]
    tables = row_tables(segments, len(inputs.q))
    before = inputs.cache.vectors.clone()
    launch.append(inputs.q, inputs.latents, inputs.positions, tables, inputs.cache, None)
    other = inputs.segments[1].pages
    assert torch.equal(inputs.cache.vectors[other], before[other])

    lengths = row_lengths(segments, len(inputs.q))
    scores = torch.zeros(len(inputs.q), 29)
    selection, _ = indexer.index_top_k(scores, lengths, 12, block=16)
    assert selection[0].tolist() == list(range(12))
    assert (selection[9:] == -1).all()

    tile = latent_tile(120, case.rows, case.heads, selected=True)
    plan = plan_latent_attention(
        segments, len(inputs.q), heads=case.heads, tile=tile, target_ctas=1, top_k=12
    )
    out, lse = launch.latent_attention(
        inputs.q,
        inputs.packed_mask,
        plan.padded(11),
        tables.page_table,
        inputs.cache,
        selection,
        tile,
        value_dim=case.value_dim,
        scale=1.0,
    )
    assert torch.isfinite(lse[:9]).all()
    assert (out[9:] == 0).all()
    assert (lse[9:] == -torch.inf).all()


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize("top_k", [1, 7, 100, 300])
def test_the_choice_is_stable(block: int, top_k: int) -> None:
    """Ties, both zeros, infinities, tiny and hidden scores; rows of all lengths."""
    generator = torch.Generator().manual_seed(top_k)
    kinds = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, torch.inf, -torch.inf, 2.5])
    few = kinds[torch.randint(0, len(kinds), (3, 260), generator=generator)]
    wide = torch.randn(3, 260, generator=generator) * 10 ** torch.randint(-9, 9, (3, 260))
    scores = torch.cat([few, wide.float(), torch.full((1, 260), -torch.inf), torch.ones(2, 260)])
    lengths = torch.tensor([260, 100, 1, 260, 77, 7, 260, 260, 0], dtype=torch.int32)
    selection, nan_counts = indexer.index_top_k(scores, lengths, top_k, block=block)
    assert_stable_choice(scores, lengths, selection)
    assert not nan_counts.any()


def test_nan_among_the_scores_is_reported_with_its_row() -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    scores[1, [4, 9]] = torch.nan
    scores[2, 30] = torch.nan  # past the row's request
    _, nan_counts = indexer.index_top_k(scores, torch.tensor([50, 50, 20]).int(), 5, block=16)
    assert nan_counts.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("rows", "heads", "selected", "expected"),
    [
        (17, 64, False, (32, 32)),
        (17, 8, False, (32, 8)),
        (17, 8, True, (16, 8)),
        (1, 6, False, (16, 6)),
    ],
)
def test_a_tile_holds_whole_groups_of_heads(
    rows: int, heads: int, selected: bool, expected: tuple[int, int]
) -> None:
    tile = latent_tile(120, rows, heads, selected=selected)
    assert (tile.block_m, tile.group) == expected


def test_an_unknown_sm_is_refused() -> None:
    with pytest.raises(ValueError, match="SM 75"):
        latent_tile(75, 17, 64, selected=False)
    with pytest.raises(ValueError, match="SM 75"):
        index_tile(75, 17, 32)
