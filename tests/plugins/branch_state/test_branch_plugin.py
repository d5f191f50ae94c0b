"""The TensorRT registration of state that branches, on the wheel's own Python files.

TensorRT itself is not here: this shows signatures, types, shapes and launches, not that an engine
runs.
"""

from pathlib import Path

from plugin_script import run_plugins
from trtree.plugins.gated_delta_net.specs import DeltaConfig
from trtree.plugins.tensorrt_plugin import PluginLayer

# Qwen3.6-27B on one of two ranks; up to 8 requests.
ROWS, SLOTS, HEADS, KEY_HEADS = 34, 8, 24, 8
CHANNELS = 128 * (2 * KEY_HEADS + HEADS)
LAYER = PluginLayer(DeltaConfig(128, 128, HEADS, HEADS // KEY_HEADS), 80)

SCRIPT = """
from trtree.plugins.causal_conv.specs import ConvLayer
from trtree.plugins.causal_conv.tensorrt_plugin import CONV
from trtree.plugins.gated_delta_net import tensorrt_plugin as delta
from trtree.plugins.tensorrt_plugin import PluginLayer

layer = delta.DELTA.layer(attribute)
rows, slots, heads, key_heads = 34, 8, 24, 8
channels = 128 * (2 * key_heads + heads)
x, f32, i32 = trt.bfloat16, trt.float32, trt.int32
tensors = {
    "x": T(x, (rows, channels)), "weight": T(f32, (channels * 4,)),
    "window": T(x, (slots, 3, channels)), "inputs": T(i32, (rows, 4)), "owners": T(i32, (rows,)),
    "requests": T(i32, (slots, 4)), "packed_mask": T(i32, (rows, 3)), "gates": T(f32, (2 * heads,)),
    "q": T(x, (rows, key_heads, 128)), "k": T(x, (rows, key_heads, 128)),
    "v": T(x, (rows, heads, 128)), "a": T(x, (rows, heads)), "b": T(x, (rows, heads)),
    "state": T(f32, (slots, heads, 128, 128)),
}
CONV.add(network, trtp, PluginLayer(ConvLayer(4), layer.sm), tensors)
added = delta.add_delta_net(network, trtp, layer, tensors)
decay = network.layers[1].outputs[0]
try:
    wrong = tensors | {"state": T(x, (slots, heads, 128, 128))}
    delta.add_delta_net(tensorrt_stub.Network(trt), trtp, layer, wrong)
    refusal = None
except ValueError as error:
    refusal = str(error)
result = {
    "decay": [decay is added["decay"], network.layers[2].inputs[4] is decay],
    "aliases": sum(o.aliases is not None for added in network.layers for o in added.outputs),
    "refusal": refusal,
}
"""


def test_tensorrts_own_rules_accept_the_plugins(tmp_path: Path) -> None:
    built = run_plugins(SCRIPT, LAYER.to_json(), tmp_path)
    conv, decay, rule = built["layers"]
    assert conv["entry"] == "causal_conv_kernel"
    assert conv["grid"] == [5, CHANNELS // 128, 1]  # 8 rows, 128 channels
    assert conv["scalars"] == [ROWS, CHANNELS, CHANNELS]
    assert conv["parameters"] == 6 + 3 + 1
    assert conv["outputs"] == [["BF16", [ROWS, CHANNELS]]]

    assert decay["entry"] == "gated_delta_decay_kernel"
    assert decay["grid"] == [SLOTS, 2, 1]  # 32 rows
    assert decay["scalars"] == [HEADS, 3]
    assert decay["parameters"] == 4 + 2 + 1
    assert decay["outputs"] == [["FLOAT", [ROWS, HEADS]]]

    assert rule["entry"] == "gated_delta_net_kernel"
    assert rule["grid"] == [SLOTS, HEADS, 4]  # 32 columns of v
    assert rule["block"] == [128, 1, 1]
    assert rule["scalars"] == [1024, 1024, 3072, HEADS, 3]
    assert rule["parameters"] == 8 + 5 + 2
    assert rule["outputs"] == [["FLOAT", [ROWS, HEADS, 128]], ["BF16", [ROWS, HEADS, 128]]]
    assert built["decay"] == [True, True]
    assert built["aliases"] == 0  # the committed state is read alone
    assert "trtree::gated_delta_net: input state is DataType.BF16" in built["refusal"]
