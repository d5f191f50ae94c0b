"""The evaluator's plugin layers against the kernels themselves, interpreted: so that networks
with plugins are not judged by a misreading of work items, tables or masks."""

from dataclasses import replace

import pytest
import torch

from plugin_layers import plugin_layer
from trtree.plugins.tensorrt_plugin import PluginLayer
from trtree.plugins.tree_attention import launch
from trtree.plugins.tree_attention.cases import AttentionCase, assert_rounded, make_inputs
from trtree.plugins.tree_attention.device_checks import cache_to, check_append
from trtree.plugins.tree_attention.plan import plan_attention, row_tables
from trtree.plugins.tree_attention.specs import LayerConfig
from trtree.plugins.tree_attention.tensorrt_plugin import PLUGINS
from trtree.plugins.tree_attention.tiles import attention_tile

CPU = torch.device("cpu")
CASE = AttentionCase(
    rows=18,
    context=300,
    page_size=16,
    group=4,
    requests=2,
    head_dim=64,
    dtype=torch.bfloat16,
    fp8_kv=False,
    window=None,
    kv_heads=2,
)


@pytest.mark.parametrize(("window", "fp8"), [(None, False), (7, False), (None, True)])
def test_plugin_layers_are_the_kernels(window: int | None, fp8: bool) -> None:
    """Two requests, the longer prefix cut in two, an idle work item, rows of nobody's."""
    inputs = make_inputs(replace(CASE, fp8_kv=fp8))
    rows, padding = len(inputs.q), 3
    config = LayerConfig(
        64, 2, 4, 16, CASE.rows, CASE.scale, 64, window=window, kv_dtype=inputs.cache.k.dtype
    )
    layer = PluginLayer(config, 120).to_json()
    tile = attention_tile(120, 64, CASE.rows, 4)
    tables = row_tables(inputs.segments, rows + padding)
    plan = plan_attention(
        inputs.segments,
        rows + padding,
        kv_heads=2,
        group=4,
        block_m=tile.block_m,
        target_ctas=64,
        window=window,
    )
    assert plan.num_items == (3 if window is None else 2)
    plan = plan.padded(plan.num_items + 1)
    q, cache = check_append(inputs, CPU)
    got = cache_to(inputs.cache, CPU, copy=True)
    known = {
        "q": padded(inputs.q, padding),
        "k": padded(inputs.k, padding),
        "v": padded(inputs.v, padding),
        "cos_sin": inputs.rope.cos_sin,
        "positions": padded(inputs.positions, padding),
        "slots": tables.slots,
        "requests": tables.requests,
        "page_table": tables.page_table,
        "k_scale": inputs.cache.k_scale if fp8 else torch.ones(2),
        "v_scale": inputs.cache.v_scale if fp8 else torch.ones(2),
        "k_cache_in": got.k,
        "v_cache_in": got.v,
        "packed_mask": padded(inputs.packed_mask, padding),
        "work": plan.work,
        "row_splits": plan.row_splits,
    }
    for plugin in PLUGINS:
        results = plugin_layer(plugin.name, layer, [known[name] for name in plugin.input_names])
        known |= dict(zip(plugin.output_names, results, strict=True))
        known["q"] = known["q_out"]
    assert torch.isnan(known["q_out"][rows:]).all()
    assert torch.equal(got.v.float(), cache.v.float())
    for ours, kernels in ((known["q_out"][:rows], q), (got.k, cache.k)):
        assert (ours.float() != kernels.float()).double().mean() < 1e-3
        step = 2**-3 if ours.dtype == torch.float8_e4m3fn else 2**-7
        torch.testing.assert_close(ours.float(), kernels.float(), rtol=step, atol=0)

    out, lse = launch.tree_attention(
        padded(known["q_out"][:rows], padding),
        known["packed_mask"],
        known["positions"],
        plan,
        tables.page_table,
        got,
        tile,
        scale=CASE.scale,
        window=window,
    )
    assert_rounded("attention", out, known["out"], 1e-5)
    assert_rounded("log-sum-exp", lse[:rows], known["lse"][:rows], 1e-5)
    assert torch.equal(known["lse"][rows:].float(), lse[rows:])


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])])
