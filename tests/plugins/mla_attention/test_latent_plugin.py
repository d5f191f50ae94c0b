"""The TensorRT registration of latent attention and its indexer, on the wheel's own Python files.

TensorRT itself is not here: this shows signatures, types, shapes, aliasing and launches, not
that an engine runs.
"""

from pathlib import Path

from plugin_script import run_plugins
from trtree.plugins.mla_attention.specs import LatentLayer
from trtree.plugins.tensorrt_plugin import PluginLayer

# GLM-5's layer on one of 8 ranks; 34 rows of two requests of at most 50 pages.
ROWS, PAGES, WIDTH, TOP_K = 34, 100, 50 * 64, 2048
LAYER = PluginLayer(LatentLayer(8, 512, 64, 64, 17, 0.0625, selected=True), 90)

SCRIPT = """
from dataclasses import replace
from trtree.plugins.mla_attention import tensorrt_plugin as latent
from trtree.plugins.mla_attention.specs import AppendLayer
from trtree.plugins.sparse_indexer import tensorrt_plugin as indexer
from trtree.plugins.sparse_indexer.specs import IndexLayer
from trtree.plugins.tensorrt_plugin import PluginLayer

layer = latent.ATTENTION.layer(attribute)
rows, pages, of_scores, of_lists, of_slots = 34, 100, 20, 34, 12
x, f32, i32 = trt.bfloat16, trt.float32, trt.int32
shared = {
    "cos_sin": T(f32, (4096, 64)), "positions": T(i32, (rows,)), "slots": T(i32, (rows,)),
    "requests": T(i32, (rows,)), "page_table": T(i32, (2, 50)), "lengths": T(i32, (rows,)),
    "packed_mask": T(i32, (rows, 3)), "row_splits": T(i32, (rows, 3)),
}
keys = shared | {
    "q": T(x, (rows, 32, 128)), "x": T(x, (rows, 128)), "cache_in": T(x, (pages, 64, 128)),
    "weights": T(f32, (rows, 32)), "work": T(i32, (of_scores, 7)),
}
of_keys = PluginLayer(AppendLayer(128, 32, 64, 0, 64), layer.sm)
appended = latent.add_append(network, trtp, of_keys, keys)
keys |= {"q": appended["q_out"], "cache": appended["cache"]}
choice = PluginLayer(IndexLayer(32, 128, 64, 17), layer.sm)
chosen = indexer.add_selection(network, trtp, choice, 2048, keys)

latents = shared | {
    "q": T(x, (rows, 8, 576)), "x": T(x, (rows, 576)), "cache_in": T(x, (pages, 64, 576)),
    "work": T(i32, (of_lists, 7)), "selection": chosen["selection"],
}
of_latents = PluginLayer(AppendLayer(576, 8, 64, 512, 64), layer.sm)
written = latent.add_append(network, trtp, of_latents, latents)
latents |= {"q": written["q_out"], "cache": written["cache"]}
out = latent.add_attention(network, trtp, layer, latents)
whole = T(i32, (of_slots, 7))
everything = replace(layer, config=replace(layer.config, selected=False))
latent.add_attention(
    network, trtp, everything, latents | {"work": whole, "selection": whole}
)
try:
    wrong = keys | {"weights": T(x, (rows, 32))}
    indexer.add_selection(tensorrt_stub.Network(trt), trtp, choice, 2048, wrong)
    refusal = None
except ValueError as error:
    refusal = str(error)
result = {
    "aliases": [appended["cache"].aliases is keys["cache_in"],
                written["cache"].aliases is latents["cache_in"]],
    "scores_read": network.layers[1].inputs[2] is appended["cache"],
    "attention_reads": [network.layers[4].inputs[index] is tensor
                        for index, tensor in ((1, written["cache"]), (4, chosen["selection"]))],
    "result": network.layers[5].outputs[0] is out,
    "refusal": refusal,
}
"""


def test_tensorrts_own_rules_accept_the_plugins(tmp_path: Path) -> None:
    built = run_plugins(SCRIPT, LAYER.to_json(), tmp_path)
    of_keys, scores, choice, of_latents, attention, combine, whole, _ = built["layers"]
    assert of_keys["name"] == "latent_append"
    assert of_keys["entry"] == "latent_append_plugin_kernel"
    assert of_keys["grid"] == [9, 33, 1]  # 4 rows per program; the key and 32 query heads
    assert of_keys["scalars"] == [50, ROWS]
    assert of_keys["parameters"] == 8 + 2 + 2
    assert of_keys["outputs"] == [["BF16", [ROWS, 32, 128]], ["BF16", [PAGES, 64, 128]]]
    assert of_latents["grid"] == [9, 9, 1]
    assert of_latents["outputs"] == [["BF16", [ROWS, 8, 576]], ["BF16", [PAGES, 64, 576]]]

    assert scores["entry"] == "index_scores_kernel"
    assert scores["grid"] == [20, 1, 1]
    assert scores["scalars"] == [50, 3, WIDTH]
    assert scores["parameters"] == 6 + 3 + 1
    assert scores["outputs"] == [["FLOAT", [ROWS, WIDTH]]]
    assert choice["grid"] == [ROWS, 1, 1]
    assert choice["scalars"] == [WIDTH, TOP_K]
    assert choice["parameters"] == 2 + 2 + 2
    assert choice["outputs"] == [["INT32", [ROWS, TOP_K]], ["INT32", [ROWS]]]

    assert attention["entry"] == "latent_tree_attention_kernel"
    assert attention["grid"] == [ROWS, 1, 1]
    assert attention["scalars"] == [50, 3, TOP_K]
    assert attention["parameters"] == 6 + 3 + 2
    assert attention["outputs"] == [["FLOAT", [ROWS, 1, 16, 512]], ["FLOAT", [ROWS, 1, 16]]]
    assert 0 < attention["shared_bytes"] <= 232448
    assert combine["grid"] == [ROWS, 1, 1]
    assert combine["parameters"] == 3 + 0 + 2
    assert combine["outputs"] == [["BF16", [ROWS, 8, 512]], ["FLOAT", [ROWS, 8]]]
    assert whole["grid"] == [12, 1, 1]
    assert whole["outputs"] == [["FLOAT", [12, 1, 32, 512]], ["FLOAT", [12, 1, 32]]]

    assert built["aliases"] == [True, True]
    assert built["scores_read"]
    assert built["attention_reads"] == [True, True]
    assert built["result"]
    assert "trtree::index_scores: input weights is DataType.BF16" in built["refusal"]
