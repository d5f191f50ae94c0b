"""What leaves the network instead of logits: argmax, and top-k log-probabilities."""

from typing import Any

import torch

from trtree.build.lowering.tensorrt.context import Lowering
from trtree.build.network.network import Op

# Above any vocabulary: where no candidate is, as after NaN.
NO_TOKEN = 2**31 - 1


def argmax(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """logits [B, O, V] -> int32 [B, O]: the lowest id among the largest.

    TopK leaves ties open, so the id is found by comparison. A row with NaN has no largest
    entry or NaN as such, and answers NO_TOKEN.
    """
    emit = low.emit
    logits = emit.wide(x[0])
    largest = emit.reduce("largest", "MAX", logits, keep=True)
    split = op.inputs[0] in low.sharded
    if split:
        largest = emit.collective("largest.all", largest, "ALL_REDUCE", "MAX", low.ranks)
    is_largest = emit.binary("is_largest", "EQUAL", logits, largest)
    none = emit.scalar(NO_TOKEN, 3, torch.int32)
    select = emit.network.add_select(is_largest, _ids(low, logits.shape[2]), none)
    candidates = emit.layer("candidates", select).get_output(0)
    lowest = emit.reduce("lowest", "MIN", candidates, keep=False)
    if split:
        lowest = emit.collective("lowest.all", lowest, "ALL_REDUCE", "MIN", low.ranks)
    return [lowest]


def top_k_log_probs(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """logits [B, O, V] -> log-probs float32 and ids int32 [B, O, k], decreasing.

    Which of equal logits come first is the library's choice; the runner sorts them by id.
    """
    emit, k = low.emit, op.attrs["k"]
    logits = emit.wide(x[0])
    split = op.inputs[0] in low.sharded
    largest = emit.reduce("largest", "MAX", logits, keep=True)
    if split:
        largest = emit.collective("largest.all", largest, "ALL_REDUCE", "MAX", low.ranks)
    powers = emit.unary("powers", "EXP", emit.binary("below", "SUB", logits, largest))
    total = emit.reduce("total", "SUM", powers, keep=True)
    if split:
        total = emit.collective("total.all", total, "ALL_REDUCE", "SUM", low.ranks)
    log_sum = emit.binary("log_sum_exp", "SUM", largest, emit.unary("log", "LOG", total))
    values, ids = _top_k(low, "top", logits, min(k, logits.shape[2]))
    if split:
        values, ids = _among_ranks(low, values, ids, logits.shape[2], k)
    if op.weights:
        offsets = emit.constant("constant/id_offsets", low.constant_data(op, "weight").int())
        ids = emit.binary("mapped", "SUM", ids, emit.gather("offsets", offsets, ids, 0))
    return [emit.binary("log_probs", "SUB", values, log_sum), ids]


def _top_k(low: Lowering, name: str, x: Any, k: int) -> tuple[Any, Any]:
    kind = low.emit.trt.TopKOperation.MAX
    layer = low.emit.layer(name, low.emit.network.add_topk(x, kind, k, 1 << 2))
    return layer.get_output(0), layer.get_output(1)


def _among_ranks(low: Lowering, values: Any, ids: Any, vocab: int, k: int) -> tuple[Any, Any]:
    """The best k of every rank's candidates, with ids of the whole vocabulary."""
    emit = low.emit
    offset = emit.scalar(low.encoding.shard.rank * vocab, 3, torch.int32)
    gathered = [
        _gather_last_axis(low, "values", values),
        _gather_last_axis(low, "ids", emit.binary("whole_ids", "SUM", ids, offset)),
    ]
    best, index = _top_k(low, "top.all", gathered[0], k)
    layer = emit.network.add_gather_v2(gathered[1], index, emit.trt.GatherMode.ELEMENT)
    layer.axis = 2
    return best, emit.layer("ids.all", layer).get_output(0)


def _gather_last_axis(low: Lowering, name: str, x: Any) -> Any:
    """[B, O, k] of every rank -> [B, O, ranks * k]; ALL_GATHER joins along the first axis."""
    first = low.emit.shuffle(f"{name}.first", x, before=(2, 0, 1))
    every = low.emit.collective(f"{name}.all", first, "ALL_GATHER", None, low.ranks)
    return low.emit.shuffle(f"{name}.last", every, before=(1, 2, 0))


def _ids(low: Lowering, vocab: int) -> Any:
    """int32 [1, 1, V]: the ids of this rank's part of the vocabulary."""
    first = low.encoding.shard.rank * vocab if low.ranks > 1 else 0
    ids = torch.arange(first, first + vocab, dtype=torch.int32)[None, None]
    return low.emit.constant("constant/ids", ids)
