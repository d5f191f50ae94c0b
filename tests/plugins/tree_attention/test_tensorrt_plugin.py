"""The TensorRT registration, on the wheel's own Python files and plain objects.

TensorRT itself is not here: this shows signatures, types, shapes, aliasing and launches, not
that an engine runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trtree.plugins.tree_attention.specs import LayerConfig
from trtree.plugins.tree_attention.tensorrt_plugin import (
    PLUGINS,
    Plugin,
    PluginLayer,
)

SUPPORT = Path(__file__).parents[2] / "support"
ROWS, PAGES, ITEMS = 34, 100, 12
LAYER = PluginLayer(LayerConfig(128, 2, 4, 16, 17, 0.125, 64, window=77), 120)

# In a process of its own: it replaces the module tensorrt, and compiles.
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
import tensorrt_stub
import torch
from trtree.plugins.tree_attention import tensorrt_plugin as plugins

trt, trtp = tensorrt_stub.load()
plugins.register_plugins(trt, trtp, Path(sys.argv[1]))
layer = plugins.PluginLayer.from_json(sys.argv[2])
rows, pages, items = 34, 100, 12
T = tensorrt_stub.ITensor
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
network = tensorrt_stub.Network(trt)
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
print(json.dumps({
    "layers": [
        {
            "name": added.name, "entry": added.entry, "grid": added.grid, "block": added.block,
            "shared_bytes": added.shared_bytes, "scalars": added.scalars,
            "parameters": added.ptx.decode().split(".entry")[1].split(")")[0].count(".param"),
            "outputs": [[o.dtype.name, list(o.shape)] for o in added.outputs],
        }
        for added in network.layers
    ],
    "aliases": [k.aliases is tensors["k_cache_in"], v.aliases is tensors["v_cache_in"]],
    "attention_reads": [network.layers[1].inputs[1] is k, network.layers[1].inputs[2] is v],
    "attention_q": network.layers[1].inputs[0] is network.layers[0].outputs[0],
    "result": network.layers[2].outputs[0] is out,
    "refusal": refusal,
}))
"""


def build(layer: PluginLayer, folder: Path) -> dict[str, Any]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(SUPPORT)
    command = [sys.executable, str(script), str(folder / "kernels"), layer.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "kv", [torch.bfloat16, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.full)], ids=str
)
def test_tensorrts_own_rules_accept_the_plugins(kv: torch.dtype, tmp_path: Path) -> None:
    layer = PluginLayer(LayerConfig(128, 2, 4, 16, 17, 0.125, 64, window=77, kv_dtype=kv), 120)
    built = build(layer, tmp_path)
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


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_kernels_take_inputs_then_integers_then_outputs(plugin: Plugin) -> None:
    spec = plugin.spec(LAYER.config, LAYER.sm)
    names = list(spec.types)
    assert spec.kernel.arg_names[: len(names)] == names
    integers = [name for name in names if spec.types[name] == "i32"]
    assert names == [*plugin.input_names, *integers, *plugin.output_names]


def test_a_layer_survives_its_attribute() -> None:
    assert PluginLayer.from_json(LAYER.to_json()) == LAYER
