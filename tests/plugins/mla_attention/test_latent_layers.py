"""The evaluator's plugin layers of latent attention against the kernels themselves, interpreted;
see ../tree_attention/test_plugin_layers.py."""

from typing import Any

import pytest
import torch

from plugin_layers import plugin_layer
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.mla_attention import launch
from trtree.plugins.mla_attention.cases import LatentCase, make_inputs
from trtree.plugins.mla_attention.device_checks import check_append
from trtree.plugins.mla_attention.plan import plan_latent_attention
from trtree.plugins.mla_attention.specs import AppendLayer, LatentLayer
from trtree.plugins.mla_attention.tiles import latent_tile
from trtree.plugins.registry import PLUGINS
from trtree.plugins.sparse_indexer import launch as indexer
from trtree.plugins.sparse_indexer.plan import plan_scores, row_lengths
from trtree.plugins.sparse_indexer.specs import IndexLayer, TopKLayer
from trtree.plugins.sparse_indexer.tiles import index_tile
from trtree.plugins.tensorrt_plugin import PluginLayer
from trtree.plugins.tree_attention.cases import assert_rounded, rope_table
from trtree.plugins.tree_attention.plan import row_tables

CASE = LatentCase(
    rows=18, context=300, page_size=16, requests=2, heads=4, top_k=270, dtype=torch.bfloat16
)
PADDING = 3  # rows of nobody's


def run(plugin: str, config: Any, known: dict[str, torch.Tensor]) -> None:
    """The layer's results, into ``known``."""
    (of,) = [candidate for candidate in PLUGINS if candidate.name == plugin]
    operands = [known[name] for name in of.input_names]
    results = plugin_layer(plugin, PluginLayer(config, 120).to_json(), operands)
    known |= dict(zip(of.output_names, results, strict=True))


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(PADDING, *x.shape[1:])])


@pytest.mark.parametrize("selected", [False, True])
def test_plugin_layers_are_the_kernels(selected: bool) -> None:
    """Two requests, the longer prefix (or list) cut in two, an idle work item."""
    inputs = make_inputs(CASE)
    num_rows, rope_dim = len(inputs.q) + PADDING, CASE.dim - CASE.value_dim
    tables = row_tables(inputs.segments, num_rows)
    q, expected = check_append(CASE, inputs, torch.device("cpu"))
    cache = LatentCache(inputs.cache.vectors.clone())
    known = {
        "q": padded(inputs.q),
        "x": padded(inputs.latents),
        "cos_sin": rope_table(rope_dim, CASE.context + CASE.rows).cos_sin,
        "positions": padded(inputs.positions),
        "slots": tables.slots,
        "requests": tables.requests,
        "page_table": tables.page_table,
        "packed_mask": padded(inputs.packed_mask),
        "cache_in": cache.vectors,
    }
    append = AppendLayer(CASE.dim, CASE.heads, CASE.page_size, CASE.value_dim, rope_dim)
    run("latent_append", append, known)
    live = slice(len(inputs.q))
    assert torch.isnan(known["q_out"][live.stop :]).all()
    for ours, kernels in ((known["q_out"][live].bfloat16(), q), (cache.vectors, expected.vectors)):
        assert (ours != kernels).double().mean() < 1e-3
        torch.testing.assert_close(ours, kernels, rtol=2**-7, atol=0)

    tile = latent_tile(120, CASE.rows, CASE.heads, selected=selected)
    plan = plan_latent_attention(
        inputs.segments,
        num_rows,
        heads=CASE.heads,
        tile=tile,
        target_ctas=64,
        top_k=CASE.top_k if selected else None,
    )
    plan = plan.padded(plan.num_items + 1)
    assert int(plan.row_splits[:, 1].max()) == 2
    selection = None
    if selected:
        selection = torch.full((num_rows, CASE.top_k), -1, dtype=torch.int32)
        for row, length in enumerate(row_lengths(inputs.segments, num_rows).tolist()):
            slots = torch.arange(min(length, row % 7), length)[: CASE.top_k - row]
            selection[row, : len(slots)] = slots
    known |= {
        "q": padded(q),
        "cache": cache.vectors,
        "work": plan.work,
        "row_splits": plan.row_splits,
        "selection": plan.work if selection is None else selection,
    }
    layer = LatentLayer(
        CASE.heads, CASE.value_dim, rope_dim, CASE.page_size, CASE.rows, CASE.scale, selected
    )
    run("latent_tree_attention", layer, known)
    run("latent_combine", layer, known)
    out, lse = launch.latent_attention(
        known["q"],
        known["packed_mask"],
        plan,
        tables.page_table,
        cache,
        selection,
        tile,
        value_dim=CASE.value_dim,
        scale=CASE.scale,
    )
    assert_rounded("latent attention", out, known["out"], 1e-5)
    assert_rounded("log-sum-exp", lse[live], known["lse"][live], 1e-5)
    assert torch.equal(known["lse"][live.stop :].float(), lse[live.stop :])


def test_the_choice_is_the_kernels() -> None:
    """Scores by slot, hidden ones and those of nobody among them; the choice of equal scores."""
    inputs = make_inputs(CASE)
    num_rows = len(inputs.index_q) + PADDING
    tables = row_tables(inputs.segments, num_rows)
    tile = index_tile(120, CASE.rows, CASE.index_heads)
    plan = plan_scores(inputs.segments, num_rows, tile, target_ctas=64)
    plan = plan.padded(plan.num_items + 1)
    width = tables.page_table.shape[1] * CASE.page_size
    # Keys of whole numbers: equal scores, exact in float32.
    cache = LatentCache(inputs.index_cache.vectors.round().clamp(-2, 2))
    known = {
        "q": padded(inputs.index_q.round()),
        "weights": padded(inputs.index_weights.round()),
        "cache": cache.vectors,
        "page_table": tables.page_table,
        "packed_mask": padded(inputs.packed_mask),
        "work": plan.work,
        "lengths": row_lengths(inputs.segments, num_rows),
    }
    layer = IndexLayer(CASE.index_heads, CASE.index_dim, CASE.page_size, CASE.rows)
    run("index_scores", layer, known)
    scores = indexer.index_scores(
        known["q"],
        known["weights"],
        known["packed_mask"],
        plan,
        tables.page_table,
        cache,
        tile,
        width=width,
    )
    computed = ~known["scores"].isnan()
    assert computed[0].sum() == 318
    assert torch.equal(known["scores"][computed].float(), scores[computed])
    known["scores"] = torch.where(computed, known["scores"], 1e9).float()
    known["scores"][3, 5] = torch.nan
    run("index_top_k", TopKLayer(CASE.top_k), known)
    chosen, nan_counts = indexer.index_top_k(known["scores"], known["lengths"], CASE.top_k)
    assert torch.equal(known["selection"].int(), chosen)
    assert torch.equal(known["nan_counts"].int(), nan_counts)
    assert nan_counts.sum() == 1
