"""Experts as dense batched products: every expert computes every row, and rows that did not
choose it weigh nothing.

``add_moe`` has no kernels on SM120, NonZero no runners, and FP4 cannot be gathered, so an
engine reads all experts at every run, whatever the rows need: ``plan.py`` says how much more
that is. Routing is a dense matrix too, [B, W, experts], so that equal scores go to the lower
expert by comparison, which TopK does not promise.

``[rows, slots, F]`` of the graph is ``[experts, B * W, F]`` here.
"""

from typing import Any

import torch

from trtree.build.lowering.tensorrt.context import Lowering
from trtree.build.lowering.tensorrt.linear import fp4_weight, quantized
from trtree.build.network.network import NetworkError, Op
from trtree.plugins.moe.contract import Routing
from trtree.plugins.moe.reference import TINY

Values = list[Any]


def route(low: Lowering, op: Op, x: Values) -> Values:
    """logits float32 [B, W, E] -> weights float32 [B, W, E]; see plugins/moe/README.md."""
    emit, routing = low.emit, Routing(**op.attrs)
    logits = x[0]
    if routing.scores == "softmax":
        largest = emit.reduce("largest", "MAX", logits, keep=True)
        scores = emit.unary("powers", "EXP", emit.binary("below", "SUB", logits, largest))
        choice = logits
        if not routing.normalize:
            total = emit.reduce("total", "SUM", scores, keep=True)
            scores = emit.binary("scores", "DIV", scores, total)
    else:
        scores = choice = emit.sigmoid("scores", logits)
    if op.weights:
        bias = emit.shuffle("bias", low.constant(op, "weight"), (1, 1, routing.experts))
        choice = emit.binary("biased", "SUM", scores, bias)
    if routing.groups > 1:
        choice = _candidates(low, choice, routing)
    chosen = _largest(low, "chosen", choice, routing.experts, routing.top_k)
    weights = emit.binary("kept", "PROD", scores, emit.wide(chosen))
    if routing.normalize:
        kept = emit.reduce("kept.sum", "SUM", weights, keep=True)
        divisor = emit.binary("divisor", "SUM", kept, emit.scalar(TINY, 3))
        weights = emit.binary("normalized", "DIV", weights, divisor)
    if routing.scale != 1:
        weights = emit.binary("scaled", "PROD", weights, emit.scalar(routing.scale, 3))
    return [weights]


def _candidates(low: Lowering, choice: Any, routing: Routing) -> Any:
    """Minus infinity outside of the best groups; a group is worth its two largest choices."""
    emit, groups = low.emit, routing.groups
    grouped = emit.shuffle("grouped", choice, (0, 0, groups, routing.group_size))
    kind = emit.trt.TopKOperation.MAX
    best_two = emit.layer("best_two", emit.network.add_topk(grouped, kind, 2, 1 << 3))
    worth = emit.reduce("worth", "SUM", best_two.get_output(0), keep=False)
    best = _largest(low, "best_groups", worth, groups, routing.top_groups)
    column = emit.shuffle("best_groups.4d", best, (0, 0, groups, 1))
    select = emit.network.add_select(column, grouped, emit.scalar(-torch.inf, 4))
    candidates = emit.layer("candidates", select).get_output(0)
    return emit.shuffle("candidates.3d", candidates, (0, 0, routing.experts))


def _largest(low: Lowering, name: str, scores: Any, size: int, count: int) -> Any:
    """bool [B, W, size]: the ``count`` largest; of equal ones the first."""
    emit = low.emit
    kind = emit.trt.TopKOperation.MAX
    top = emit.layer(f"{name}.top", emit.network.add_topk(scores, kind, count, 1 << 2))
    least = emit.reduce(f"{name}.least", "MIN", top.get_output(0), keep=True)
    above = emit.binary(f"{name}.above", "GREATER", scores, least)
    equal = emit.binary(f"{name}.equal", "EQUAL", scores, least)
    # How many equal ones come before each; small whole numbers, exact in float32.
    earlier = torch.triu(torch.ones(1, size, size), diagonal=1)
    op = emit.trt.MatrixOperation
    product = emit.network.add_matrix_multiply(
        emit.wide(equal), op.NONE, emit.constant(f"constant/earlier/{size}", earlier), op.NONE
    )
    before = emit.layer(f"{name}.before", product).get_output(0)
    taken = emit.reduce(f"{name}.taken", "SUM", emit.wide(above), keep=True)
    room = emit.binary(f"{name}.room", "SUB", emit.scalar(count, 3), taken)
    fits = emit.binary(f"{name}.fits", "LESS", before, room)
    return emit.binary(name, "OR", above, emit.binary(f"{name}.tied", "AND", equal, fits))


def experts_scale(low: Lowering, op: Op, x: Values) -> Values:
    """x [B, W, K] or [E, B * W, K] times each expert's vector -> [E, B * W, K]."""
    emit = low.emit
    low.inherit(op)
    experts = int(low.network.tensors[op.inputs[1]].shape[1])
    vectors = emit.shuffle("vectors", low.constant(op, "weight"), (experts, 1, -1))
    rows = emit.wide(_every_row(low, op, x[0]))
    return [low.rounded(emit.binary("scaled", "PROD", rows, vectors))]


def experts_linear(low: Lowering, op: Op, x: Values) -> Values:
    """x [B, W, K], or [E, B * W, K] -> [E, B * W, O]."""
    parallel = op.attrs.get("parallel")
    _check_parallel(low, op)
    y = _product(low, op, _every_row(low, op, x[0]))
    if parallel == "row" and low.ranks > 1:
        y = low.emit.collective("all_reduce", y, "ALL_REDUCE", "SUM", low.ranks)
    elif parallel == "column" and low.ranks > 1:
        low.sharded.update(op.outputs)
    return [low.rounded(y)]


def experts_up(low: Lowering, op: Op, x: Values) -> Values:
    """x [B, W, K], or [E, B * W, K] -> h [E, B * W, I]."""
    emit = low.emit
    weight = low.network.weights[op.weights[0]]
    both = low.rounded(_product(low, op, _every_row(low, op, x[0])))
    if len(x) > 2:
        both = emit.binary("both", "SUM", emit.wide(both), emit.wide(x[2]))
    if low.ranks > 1:
        low.sharded.update(op.outputs)
    width = len(low.encoding.shard.features(weight.sizes[0], f"{op.name}: intermediate"))
    gate, up = (
        emit.wide(_last_axis_slice(low, name, both, start, width))
        for name, start in (("gate", 0), ("up", width))
    )
    silu = emit.binary("silu", "PROD", gate, emit.sigmoid("sigmoid", gate))
    return [low.rounded(emit.binary("gated", "PROD", silu, up))]


def experts_down(low: Lowering, op: Op, x: Values) -> Values:
    """h [E, B * W, I], weights [B, W, E] -> [B, W, O]."""
    emit = low.emit
    weight = low.network.weights[op.weights[0]]
    _check_parallel(low, op)
    each = emit.wide(_product(low, op, x[0]))
    column = emit.shuffle("weights", x[1], (1, -1, weight.experts), after=(2, 1, 0))
    weighted = emit.binary("weighted", "PROD", each, column)
    y = emit.reduce("sum", "SUM", weighted, keep=False, axis=0)
    if low.ranks > 1 and op.attrs.get("parallel") == "row":
        y = emit.collective("all_reduce", y, "ALL_REDUCE", "SUM", low.ranks)
    layer = emit.network.add_shuffle(y)
    layer.set_input(1, low.row_shape(weight.num_rows // weight.experts))
    return [low.rounded(emit.layer("rows", layer).get_output(0))]


def _check_parallel(low: Lowering, op: Op) -> None:
    by_columns = op.attrs.get("parallel") == "row"
    if low.ranks > 1 and (op.inputs[0] in low.sharded) != by_columns:
        how = ("row", "whole on every rank") if by_columns else ("not row", "divided among ranks")
        raise NetworkError(f"{op.name}: {how[0]}-parallel, but its input is {how[1]}")


def _every_row(low: Lowering, op: Op, x: Any) -> Any:
    """x [B, W, K] as [1, B * W, K]; of slots, which are [E, B * W, K] already, itself."""
    if len(low.network.tensors[op.inputs[0]].shape) == 3:
        return x
    return low.emit.shuffle("flat", x, (1, -1, int(x.shape[-1])))


def _product(low: Lowering, op: Op, x: Any) -> Any:
    """x [1 or E, T, K] times each expert's weight -> [E, T, O]."""
    emit, trt = low.emit, low.emit.trt
    weight = low.network.weights[op.weights[0]]
    scaled = weight.kind == "nvfp4" and low.encoding.fp4
    if weight.kind == "dense":
        matrix = low.constant(op, "weight")
    elif scaled:
        # Experts' global scales differ: the product is scaled instead, which is exact too.
        matrix = fp4_weight(low, op, emit.constant("constant/one", torch.tensor(1.0)))
    else:
        values, scale = low.constant(op, "values"), low.constant(op, "scale")
        matrix = emit.layer("weight", emit.network.add_dequantize(values, scale, trt.float32))
        matrix = matrix.get_output(0)
    if weight.activations == "nvfp4":
        x = quantized(low, op, x)
    else:
        x = emit.cast(x, trt.bfloat16) if weight.activations == "bf16" else x
        matrix = emit.cast(matrix, x.dtype)
    operation = trt.MatrixOperation
    product = emit.network.add_matrix_multiply(x, operation.NONE, matrix, operation.TRANSPOSE)
    y = emit.layer("product", product).get_output(0)
    if scaled:
        y = emit.binary("scaled_product", "PROD", emit.wide(y), low.constant(op, "global_scale"))
    return y


def _last_axis_slice(low: Lowering, name: str, x: Any, start: int, size: int) -> Any:
    """x[..., start : start + size] of an [E, T, F] tensor."""
    emit = low.emit
    layer = emit.network.add_slice(x, (0, 0, start), (1, 1, size), (1, 1, 1))
    layer.set_input(2, low.expert_shape(x, size))
    return emit.layer(name, layer).get_output(0)
