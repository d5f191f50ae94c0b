"""``--attention plugin`` of state that branches: the convolution and the gated delta rule over
ragged rows. NOT YET RUN, like paged.py.

An engine reads the committed states of all slots and leaves what each row adds; the runner
commits. Rows are related by their packed masks, and by the table of the convolution's inputs.
"""

from typing import Any

from trtree.build.lowering.reference import TORCH_DTYPES
from trtree.build.lowering.tensorrt.branch import PARENTS
from trtree.build.lowering.tensorrt.context import ROWS, Binding, Lowering
from trtree.build.lowering.tensorrt.paged import BRANCH_REQUESTS, REQUESTS, paged_of
from trtree.build.network.network import Op


def causal_conv(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [1, rows, C] -> [1, rows, C]."""
    from trtree.plugins.causal_conv.specs import ConvLayer
    from trtree.plugins.causal_conv.tensorrt_plugin import CONV
    from trtree.plugins.tensorrt_plugin import PluginLayer

    paged, emit = paged_of(low), low.emit
    low.inherit(op)
    channels = low.extent(op.inputs[0])
    rows = emit.shuffle("rows", x[0], (-1, channels))
    layer = ConvLayer(op.attrs["kernel"], TORCH_DTYPES[low.network.dtype])
    tensors = {
        "x": rows,
        "weight": low.constant(op, "weight"),
        "window": low.committed[str(op.state)],
        "inputs": low.values[PARENTS],
        "owners": paged.step[REQUESTS],
        "requests": paged.step[BRANCH_REQUESTS],
    }
    of_sm = PluginLayer(layer, paged.sizes.sm)
    added = CONV.add(emit.network, paged.plugins, of_sm, tensors, emit.layer)
    low.kept[f"{op.state}.x"] = rows
    return [emit.shuffle("step", added["out"], (1, -1, channels))]


def gated_delta_net(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q, k [rows, key heads, K], v [rows, heads, V], a and b [1, rows, heads] -> like v."""
    from trtree.plugins.gated_delta_net.specs import DeltaConfig
    from trtree.plugins.gated_delta_net.tensorrt_plugin import add_delta_net
    from trtree.plugins.tensorrt_plugin import PluginLayer

    paged, emit = paged_of(low), low.emit
    low.inherit(op)
    q, k, v, a, b, _ = x
    state = low.network.states[str(op.state)]
    key_heads, heads = low.extent(op.inputs[1]), low.extent(op.inputs[2])
    layer = DeltaConfig(
        key_dim=state.head_dim,
        value_dim=state.value_dim,
        heads=heads,
        group=heads // key_heads,
        dtype=TORCH_DTYPES[low.network.dtype],
    )
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "a": emit.shuffle("a", a, (-1, heads)),
        "b": emit.shuffle("b", b, (-1, heads)),
        "gates": low.constant(op, "weight"),
        "packed_mask": low.values["packed_mask"],
        "requests": paged.step[BRANCH_REQUESTS],
        "state": low.committed[state.name],
    }
    of_sm = PluginLayer(layer, paged.sizes.sm)
    added = add_delta_net(emit.network, paged.plugins, of_sm, tensors, emit.layer)
    low.kept |= {
        f"{state.name}.k": k,
        f"{state.name}.u": added["update"],
        f"{state.name}.g": added["decay"],
    }
    return [added["out"]]


def kept_binding(kept: Any) -> Binding:
    """What rows leave to a commit: inputs of a convolution [rows, C]; keys [rows, key heads, K],
    updates float32 [rows, heads, V], sums of log decays float32 [rows, heads]."""
    dtype = {"FLOAT": "float32", "BF16": "bfloat16", "HALF": "float16"}[kept.dtype.name]
    return Binding(kept.name, dtype, (ROWS, *(int(dim) for dim in kept.shape[1:])))


OPS = {"causal_conv": causal_conv, "gated_delta_net": gated_delta_net}
