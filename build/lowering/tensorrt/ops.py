"""The table from op to layers. Every op computes in float32 and rounds its result once,
but for matrix products and attention, whose kernels do so themselves."""

from typing import Any

from trtree.build.lowering.tensorrt.attention import (
    kv_append,
    rotary_embedding,
    tree_attention,
)
from trtree.build.lowering.tensorrt.branch import causal_conv, gated_delta_net
from trtree.build.lowering.tensorrt.context import Lowering, OpFunction
from trtree.build.lowering.tensorrt.experts import (
    experts_down,
    experts_linear,
    experts_scale,
    experts_up,
    route,
)
from trtree.build.lowering.tensorrt.latent import (
    head_linear,
    index_select,
    latent_append,
    latent_attention,
    layer_norm,
)
from trtree.build.lowering.tensorrt.linear import linear
from trtree.build.lowering.tensorrt.sampling import argmax, top_k_log_probs
from trtree.build.network.network import NetworkError, Op

Values = list[Any]


def _embedding(low: Lowering, op: Op, x: Values) -> Values:
    return [low.emit.gather("rows", low.constant(op, "weight"), x[0], 0)]


def _rms_norm(low: Lowering, op: Op, x: Values) -> Values:
    emit = low.emit
    rank = len(x[0].shape)
    if op.inputs[0] in low.sharded:
        if len(low.network.tensors[op.inputs[0]].shape) == 2:
            raise NetworkError(f"{op.name}: norms features that are divided among ranks")
        low.inherit(op)  # per head, and heads are whole
    wide = emit.wide(x[0])
    square = emit.binary("square", "PROD", wide, wide)
    mean = emit.reduce("mean", "AVG", square, keep=True)
    shifted = emit.binary("eps", "SUM", mean, emit.scalar(op.attrs["eps"], rank))
    normed = emit.binary("normed", "DIV", wide, emit.unary("root", "SQRT", shifted))
    weight = low.constant(op, "weight")
    shape = (*[1] * (rank - 1), weight.shape[0])
    weight = emit.shuffle("weight", weight, shape)
    return [low.rounded(emit.binary("scaled", "PROD", normed, weight))]


def _scale(low: Lowering, op: Op, x: Values) -> Values:
    emit = low.emit
    low.inherit(op)
    weight = low.constant(op, "weight")
    weight = emit.shuffle("vector", weight, (*[1] * (len(x[0].shape) - 1), weight.shape[0]))
    return [low.rounded(emit.binary("scaled", "PROD", emit.wide(x[0]), weight))]


def _silu_mul(low: Lowering, op: Op, x: Values) -> Values:
    emit = low.emit
    low.inherit(op)
    gate, up = emit.wide(x[0]), emit.wide(x[1])
    silu = emit.binary("silu", "PROD", gate, emit.sigmoid("sigmoid", gate))
    return [low.rounded(emit.binary("gated", "PROD", silu, up))]


def _sigmoid_mul(low: Lowering, op: Op, x: Values) -> Values:
    """The gate is of x's shape, or one number for all of a row's."""
    emit = low.emit
    low.inherit(op)
    gate = emit.sigmoid("sigmoid", emit.wide(x[1]))
    return [low.rounded(emit.binary("gated", "PROD", emit.wide(x[0]), gate))]


def _add(low: Lowering, op: Op, x: Values) -> Values:
    low.inherit(op)
    if not low.sharded.isdisjoint(op.inputs) and not low.sharded.issuperset(op.inputs):
        raise NetworkError(f"{op.name}: adds what is divided among ranks to what is whole")
    return [low.emit.binary("sum", "SUM", x[0], x[1])]


def split(low: Lowering, op: Op, x: Values) -> Values:
    """Of features, which ranks may divide, or of every head."""
    low.inherit(op)
    parts, start = [], 0
    for index, (name, whole) in enumerate(zip(op.outputs, op.attrs["sizes"], strict=True)):
        size = low.extent(name) if len(x[0].shape) == 3 else whole
        parts.append(low.last_axis_slice(f"part{index}", x[0], start, size))
        start += size
    return parts


def concat(low: Lowering, op: Op, x: Values) -> Values:
    low.inherit(op)
    layer = low.emit.network.add_concatenation(x)
    layer.axis = len(x[0].shape) - 1
    return [low.emit.layer("joined", layer).get_output(0)]


def _reshape(low: Lowering, op: Op, x: Values) -> Values:
    """Features to heads, heads to features, or the same numbers to other heads."""
    low.inherit(op)
    before = low.network.tensors[op.inputs[0]].shape
    after = low.network.tensors[op.outputs[0]].shape
    extent = low.extent(op.outputs[0])
    if (len(before), len(after)) == (2, 3):
        shape = (0, 0, extent, int(after[2]))
        return [low.emit.shuffle("heads", x[0], shape, after=(0, 2, 1, 3))]
    if (len(before), len(after)) == (3, 2):
        return [low.emit.shuffle("merged", x[0], (0, 0, extent), before=(0, 2, 1, 3))]
    if (len(before), len(after)) == (3, 3):
        shape, turned = (0, 0, extent, int(after[2])), (0, 2, 1, 3)
        return [low.emit.shuffle("regrouped", x[0], shape, before=turned, after=turned)]
    raise NetworkError(
        f"{op.name}: the TensorRT lowering has no reshape from {list(before)} to {list(after)}"
    )


def _gather_rows(low: Lowering, op: Op, x: Values) -> Values:
    return [low.emit.gather("rows", x[0], x[1], 1, batch_dims=1)]


# Ops that take operands which are divided among ranks.
SHARDABLE = frozenset(
    {
        "add",
        "argmax",
        "causal_conv",
        "concat",
        "experts_down",
        "experts_linear",
        "experts_scale",
        "experts_up",
        "gated_delta_net",
        "head_linear",
        "kv_append",
        "latent_attention",
        "linear",
        "reshape",
        "rms_norm",
        "rotary_embedding",
        "scale",
        "sigmoid_mul",
        "silu_mul",
        "split",
        "top_k_log_probs",
        "tree_attention",
    }
)

OPS: dict[str, OpFunction] = {
    "add": _add,
    "argmax": argmax,
    "causal_conv": causal_conv,
    "concat": concat,
    "embedding": _embedding,
    "experts_down": experts_down,
    "experts_linear": experts_linear,
    "experts_scale": experts_scale,
    "experts_up": experts_up,
    "gated_delta_net": gated_delta_net,
    "gather_rows": _gather_rows,
    "head_linear": head_linear,
    "index_select": index_select,
    "kv_append": kv_append,
    "latent_append": latent_append,
    "latent_attention": latent_attention,
    "layer_norm": layer_norm,
    "linear": linear,
    "reshape": _reshape,
    "rms_norm": _rms_norm,
    "rotary_embedding": rotary_embedding,
    "route": route,
    "scale": _scale,
    "sigmoid_mul": _sigmoid_mul,
    "silu_mul": _silu_mul,
    "split": split,
    "top_k_log_probs": top_k_log_probs,
    "tree_attention": tree_attention,
}
