"""The TensorRT registration, on the wheel's own Python files and plain objects.

TensorRT itself is not here: this shows signatures, types, shapes, aliasing and launches, not
that an engine runs.
"""

from pathlib import Path

import pytest
import torch

from plugin_script import run_plugins
from trtree.plugins.tensorrt_plugin import PluginLayer
from trtree.plugins.tree_attention.specs import LayerConfig

ROWS, PAGES, ITEMS = 34, 100, 12

SCRIPT = """
from dataclasses import replace
import torch
from trtree.plugins.tree_attention import tensorrt_plugin as plugins

layer = plugins.ATTENTION.layer(attribute)
rows, pages, items = 34, 100, 12
fp8 = layer.config.kv_dtype == torch.float8_e4m3fn
x, f32, i32 = trt.bfloat16, trt.float32, trt.int32
cache = T(trt.fp8 if fp8 else x, (pages, 16, 2, 128))
tensors = {
    "q": T(x, (rows, 8, 128)), "k": T(x, (rows, 2, 128)), "v": T(x, (rows, 2, 128)),
    "cos_sin": T(f32, (4096, 64)), "positions": T(i32, (rows,)), "slots": T(i32, (rows,)),
    "requests": T(i32, (rows,)), "page_table": T(i32, (2, 50)), "k_scale": T(f32, (2,)),
    "v_scale": T(f32, (2,)), "k_cache_in": cache, "v_cache_in": replace(cache),
    "packed_mask": T(i32, (rows, 3)), "work": T(i32, (items, 7)), "row_splits": T(i32, (rows, 3)),
}
added = plugins.add_attention(network, trtp, layer, tensors)
out, k, v = (added[name] for name in ("out", "k_cache", "v_cache"))
if not fp8:  # as a drafter's context has it: keys and values alone
    alone = replace(layer, config=replace(layer.config, group=0))
    plugins.add_append(network, trtp, alone, tensors | {"q": tensors["k"]})
try:
    wrong = tensors | {"positions": T(trt.int64, (rows,))}
    plugins.add_attention(tensorrt_stub.Network(trt), trtp, layer, wrong)
    refusal = None
except ValueError as error:
    refusal = str(error)
result = {
    "aliases": [k.aliases is tensors["k_cache_in"], v.aliases is tensors["v_cache_in"]],
    "attention_reads": [network.layers[1].inputs[1] is k, network.layers[1].inputs[2] is v],
    "attention_q": network.layers[1].inputs[0] is network.layers[0].outputs[0],
    "result": network.layers[2].outputs[0] is out,
    "refusal": refusal,
}
"""


@pytest.mark.parametrize(
    "kv", [torch.bfloat16, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.full)], ids=str
)
def test_tensorrts_own_rules_accept_the_plugins(kv: torch.dtype, tmp_path: Path) -> None:
    layer = PluginLayer(LayerConfig(128, 2, 4, 16, 17, 0.125, 64, window=77, kv_dtype=kv), 120)
    built = run_plugins(SCRIPT, layer.to_json(), tmp_path)
    append, attention, combine, *alone = built["layers"]
    cache = "FP8" if kv == torch.float8_e4m3fn else "BF16"
    assert append["name"] == "tree_kv_append"
    assert append["entry"] == "tree_kv_append_plugin_kernel"
    assert append["grid"] == [9, 2, 1]  # 4 rows per program, KV heads
    assert append["scalars"] == [50, ROWS]
    assert append["parameters"] == 12 + 2 + 3
    shape = [PAGES, 16, 2, 128]
    assert append["outputs"] == [["BF16", [ROWS, 8, 128]], [cache, shape], [cache, shape]]

    assert attention["entry"] == "tree_attention_kernel"
    assert attention["grid"] == [ITEMS, 2, 1]
    assert attention["block"] == [256, 1, 1]
    assert 0 < attention["shared_bytes"] <= 101376
    assert attention["scalars"] == [50, 3]
    assert attention["parameters"] == 9 + 2 + 2
    assert attention["outputs"] == [["FLOAT", [ITEMS, 2, 128, 128]], ["FLOAT", [ITEMS, 2, 128]]]

    assert combine["grid"] == [ROWS, 2, 1]
    assert combine["scalars"] == []
    assert combine["parameters"] == 3 + 0 + 2
    assert combine["outputs"] == [["BF16", [ROWS, 8, 128]], ["FLOAT", [ROWS, 8]]]

    if kv == torch.bfloat16:
        assert alone[0]["entry"] == append["entry"]
        assert alone[0]["outputs"] == [["BF16", [ROWS, 2, 128]], *append["outputs"][1:]]

    assert built["aliases"] == [True, True]
    assert built["attention_reads"] == [True, True]
    assert built["attention_q"]
    assert built["result"]
    assert "trtree::tree_kv_append: input positions is DataType.INT64" in built["refusal"]
