"""Latent attention, the indexer that chooses its keys, and the linears of single heads.

A selection is a mask here, bool [B, W, S], instead of a list of slots: every key is scored and
attended, and what a row did not choose weighs nothing. So an engine's attention does not get
cheaper by a selection; it only gives the model's own answer. Where a request's slots are no
more than top_k, the selection is what a row sees, and the indexer is not computed at all.
"""

from typing import Any

import torch

from trtree.build.lowering.tensorrt.attention import visible_keys
from trtree.build.lowering.tensorrt.context import Lowering
from trtree.build.network.network import Op

# Slots counted together where equal scores are ranked; a cache's length is a multiple of it.
_COUNTED = 64


def latent_append(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [B, W, D] goes behind each request's committed_lengths [B]."""
    emit, state = low.emit, str(op.state)
    vectors, lengths = x
    update = emit.shuffle("one_head", vectors, (0, 1, -1, int(vectors.shape[2])))
    (cache,) = low.caches[state]
    mode = emit.trt.KVCacheMode.LINEAR
    added = emit.network.add_kv_cache_update(cache, update, lengths, mode)
    low.caches[state] = (emit.layer("latent", added).get_output(0),)
    return []


def index_select(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q [B, heads, W, D], weights float32 [B, W, heads] -> bool [B, W, S].

    Products are of float32, so that scores are not rounded before they are compared. The
    constant (heads * D)^-0.5 changes no order and is left out. NaN that is in the scores alone
    goes unseen: it compares as not chosen.
    """
    emit, top_k = low.emit, op.attrs["top_k"]
    q, weights, _ = x
    visible = visible_keys(low, op.inputs[2], low.values["positions"], None)
    seen = emit.shuffle("visible", visible, (0, -1, low.cache_length))
    if low.cache_length <= top_k:
        return [seen]
    (keys,) = low.caches[str(op.state)]
    operation = emit.trt.MatrixOperation
    added = emit.network.add_matrix_multiply(
        emit.wide(q), operation.NONE, emit.wide(keys), operation.TRANSPOSE
    )
    products = emit.layer("products", added).get_output(0)  # [B, heads, W, S]
    positive = emit.binary("positive", "MAX", products, emit.scalar(0.0, 4))
    by_head = emit.shuffle("weights", weights, (0, 0, -1, 1), before=(0, 2, 1))
    weighed = emit.binary("weighed", "PROD", positive, by_head)
    scores = emit.reduce("scores", "SUM", weighed, keep=False, axis=1)
    hidden = emit.network.add_select(seen, scores, emit.scalar(-torch.inf, 3))
    candidates = emit.layer("candidates", hidden).get_output(0)
    largest = _largest(low, candidates, top_k)
    # Rows that see fewer than top_k keys have tied with hidden ones.
    return [emit.binary("chosen", "AND", largest, seen)]


def _largest(low: Lowering, scores: Any, count: int) -> Any:
    """bool [B, W, S]: the ``count`` largest of scores [B, W, S]; of equal ones the first.

    TopK gives their values in some order; which of those that equal the least are taken is
    decided by counting them in the order of their slots, in whole numbers, exact in float32.
    """
    emit, length = low.emit, low.cache_length
    kind = emit.trt.TopKOperation.MAX
    top = emit.layer("top", emit.network.add_topk(scores, kind, count, 1 << 2)).get_output(0)
    least = emit.reduce("least", "MIN", top, keep=True)
    above = emit.binary("above", "GREATER", scores, least)
    equal = emit.binary("equal", "EQUAL", scores, least)
    groups = length // _COUNTED
    grouped = emit.shuffle("equal.grouped", emit.wide(equal), (0, -1, groups, _COUNTED))
    within = _earlier(low, "within", grouped, _COUNTED)
    totals = emit.reduce("totals", "SUM", grouped, keep=False)  # [B, W, groups]
    totals = emit.shuffle("totals.4d", totals, (0, -1, 1, groups))
    ahead = _earlier(low, "ahead", totals, groups)
    ahead = emit.shuffle("ahead.4d", ahead, (0, -1, groups, 1))
    before = emit.binary("before.grouped", "SUM", within, ahead)
    before = emit.shuffle("before", before, (0, -1, length))
    taken = emit.reduce("taken", "SUM", emit.wide(above), keep=True)
    room = emit.binary("room", "SUB", emit.scalar(count, 3), taken)
    fits = emit.binary("fits", "LESS", before, room)
    return emit.binary("largest", "OR", above, emit.binary("tied", "AND", equal, fits))


def _earlier(low: Lowering, name: str, x: Any, size: int) -> Any:
    """x [..., size] -> for each the sum of those before it."""
    emit = low.emit
    before = torch.triu(torch.ones(1, 1, size, size), diagonal=1)
    constant = emit.constant(f"constant/before/{size}", before)
    operation = emit.trt.MatrixOperation
    added = emit.network.add_matrix_multiply(x, operation.NONE, constant, operation.NONE)
    return emit.layer(name, added).get_output(0)


def latent_attention(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q [B, heads, W, D] over the cache -> [B, heads, W, value_dim].

    The latents are the values too, whole: the sum is cut instead of a copy of the cache.
    """
    emit = low.emit
    low.inherit(op)
    if len(x) == 3:
        axis = emit.constant("constant/int64/1/axis", torch.tensor([1]))
        mask = emit.layer("chosen.4d", emit.network.add_unsqueeze(x[2], axis)).get_output(0)
    else:
        mask = visible_keys(low, op.inputs[1], low.values["positions"], None)
    # IAttention does not scale its scores.
    scaled = emit.binary("scaled", "PROD", emit.wide(x[0]), emit.scalar(op.attrs["scale"], 4))
    (latents,) = low.caches[str(op.state)]
    softmax = emit.trt.AttentionNormalizationOp.SOFTMAX
    added = emit.network.add_attention(low.rounded(scaled), latents, latents, softmax, False)
    if added is not None:
        added.mask = mask
        added.decomposable = True  # there are no kernels of its own for 576 numbers a head
    attended = emit.layer("attended", added).get_output(0)
    return [low.last_axis_slice("values", attended, 0, op.attrs["value_dim"])]


def head_linear(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [B, heads, W, in] -> [B, heads, W, out] by one part of every head's matrix."""
    emit = low.emit
    low.inherit(op)
    if low.ranks > 1:
        low.sharded.update(op.outputs)
    key_dim, value_dim = op.attrs["key_dim"], op.attrs["value_dim"]
    weight = low.constant(op, "weight")
    heads, latent = int(weight.shape[0]) // (key_dim + value_dim), int(weight.shape[1])
    matrices = emit.shuffle("heads", weight, (1, heads, key_dim + value_dim, latent))
    first, size = {"key": (0, key_dim), "value": (key_dim, value_dim)}[op.attrs["part"]]
    added = emit.network.add_slice(
        matrices, (0, 0, first, 0), (1, heads, size, latent), (1, 1, 1, 1)
    )
    part = emit.layer("part", added).get_output(0)
    operation = emit.trt.MatrixOperation
    turned = operation.NONE if op.attrs["part"] == "key" else operation.TRANSPOSE
    product = emit.network.add_matrix_multiply(x[0], operation.NONE, part, turned)
    return [low.rounded(emit.layer("product", product).get_output(0))]


def layer_norm(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """Over the last axis; the op's vector holds the weight, then the bias."""
    emit, rank = low.emit, len(x[0].shape)
    wide = emit.wide(x[0])
    centred = emit.binary("centred", "SUB", wide, emit.reduce("mean", "AVG", wide, keep=True))
    square = emit.binary("square", "PROD", centred, centred)
    variance = emit.reduce("variance", "AVG", square, keep=True)
    shifted = emit.binary("eps", "SUM", variance, emit.scalar(op.attrs["eps"], rank))
    normed = emit.binary("normed", "DIV", centred, emit.unary("root", "SQRT", shifted))
    both = low.constant(op, "weight")
    features = int(both.shape[0]) // 2
    weight, bias = (
        emit.shuffle(
            name,
            emit.layer(
                f"{name}.part", emit.network.add_slice(both, (start,), (features,), (1,))
            ).get_output(0),
            (*[1] * (rank - 1), features),
        )
        for name, start in (("weight", 0), ("bias", features))
    )
    scaled = emit.binary("scaled", "PROD", normed, weight)
    return [low.rounded(emit.binary("shifted", "SUM", scaled, bias))]
