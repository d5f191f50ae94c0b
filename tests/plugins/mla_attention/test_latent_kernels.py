"""The kernels of latent attention and of its indexer, interpreted, against the references."""

from typing import Any

import pytest
import torch

from trtree.plugins.mla_attention.cases import LatentCase, make_inputs
from trtree.plugins.mla_attention.device_checks import (
    assert_stable_choice,
    check_append,
    check_attention,
    check_commit,
    check_select,
)
from trtree.plugins.mla_attention.tiles import LatentTile, latent_tile
from trtree.plugins.sparse_indexer.launch import index_top_k
from trtree.plugins.sparse_indexer.tiles import index_tile
from trtree.plugins.tree_attention.cases import pairwise

CPU = torch.device("cpu")
# Interpreted products are float32 throughout, so nothing rounds a softmax weight.
FLOAT32_ERROR = 4e-6

FACTORS: dict[str, tuple[Any, ...]] = {
    "rows": (1, 2, 33, 65, 129),
    "context": (0, 1, 127, 1000),
    "page_size": (1, 16, 64),
    "requests": (1, 2, 3),
    "heads": (1, 4, 6, 40),
    "index_heads": (1, 6, 16),
    # Shorter and longer than what the rows see, and no power of two.
    "top_k": (1, 50, 64, 2048),
    "dtype": (torch.bfloat16, torch.float16),
    "dims": ((48, 32), (40, 24)),
}


def cases() -> list[LatentCase]:
    def cost(choice: dict[str, Any]) -> float:
        return float(choice["rows"] * choice["heads"] * choice["requests"]) / 200

    sample = pairwise(FACTORS, cost)
    dims = [dict(zip(("dim", "value_dim"), choice.pop("dims"), strict=True)) for choice in sample]
    return [LatentCase(**choice, **dim) for choice, dim in zip(sample, dims, strict=True)]


def check(case: LatentCase, block: int = 256) -> None:
    inputs = make_inputs(case)
    # Many rows per program: interpreted, a program's cost hardly grows with them.
    q, cache = check_append(case, inputs, CPU, rows_per_program=64)
    choosing = index_tile(120, case.rows, case.index_heads)
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
            tile,
            CPU,
            target_ctas=8,
            weight_error=FLOAT32_ERROR,
        )
    check_commit(case, inputs, CPU)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_kernels_equal_the_references(case: LatentCase) -> None:
    check(case)
