"""Positions, KV cache and attention with the tree mask."""

from typing import Any

import torch

from trtree.build.lowering.tensorrt.context import Lowering
from trtree.build.network.network import Op


def rotary_embedding(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """x [B, heads, W, D], positions int32 [B, W]; angles come from tables in float32."""
    emit = low.emit
    if op.inputs[0] in low.sharded:
        low.sharded.update(op.outputs)
    inv_freq = torch.tensor(low.network.constants[op.attrs["inv_freq"]], dtype=torch.float64)
    angles = torch.arange(low.cache_length).double()[:, None] * inv_freq
    scaling = op.attrs["scaling"]
    tables = [
        emit.constant(f"{op.attrs['inv_freq']}.{name}", (values * scaling).float())
        for name, values in (("cos", angles.cos()), ("sin", angles.sin()))
    ]
    layer = emit.network.add_rotary_embedding(
        emit.wide(x[0]), *tables, op.attrs["interleaved"], 2 * len(inv_freq)
    )
    layer.set_input(3, x[1])
    return [low.rounded(emit.layer("turned", layer).get_output(0))]


def kv_append(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """k, v [B, heads, W, D] go behind each request's committed_lengths [B]."""
    emit = low.emit
    k, v, lengths = x
    mode = emit.trt.KVCacheMode.LINEAR
    updated = []
    for name, cache, update in zip("kv", low.caches[str(op.state)], (k, v), strict=True):
        added = emit.network.add_kv_cache_update(cache, update, lengths, mode)
        updated.append(emit.layer(name, added).get_output(0))
    low.caches[str(op.state)] = (updated[0], updated[1])
    return []


def tree_attention(low: Lowering, op: Op, x: list[Any]) -> list[Any]:
    """q [B, heads, W, D] over the whole cache, of which the mask shows each row its part."""
    emit = low.emit
    q, _, positions = x
    if op.inputs[0] in low.sharded:
        low.sharded.update(op.outputs)
    mask = visible_keys(low, op.inputs[1], positions, op.attrs["window"])
    # IAttention does not scale its scores.
    scale = emit.scalar(op.attrs["scale"], 4)
    q = low.rounded(emit.binary("scaled", "PROD", emit.wide(q), scale))
    k, v = low.caches[str(op.state)]
    softmax = emit.trt.AttentionNormalizationOp.SOFTMAX
    added = emit.network.add_attention(q, k, v, softmax, False)
    if added is not None:
        added.mask = mask
    return [emit.layer("attended", added).get_output(0)]


def visible_keys(low: Lowering, mask_input: str, positions: Any, window: int | None) -> Any:
    """bool [B, 1, W, S], computed once and shared by all layers: the committed prefix, and
    of the step's own rows those in the tree mask; with a window, only keys at positions
    above the row's minus the window."""
    key = (mask_input, window)
    if key not in low.masks:
        with low.emit.op(f"{mask_input}.visible" + (f".window{window}" if window else "")):
            low.masks[key] = _make_visible(low, low.values[mask_input], positions, window)
    return low.masks[key]


def _make_visible(low: Lowering, tree_mask: Any, positions: Any, window: int | None) -> Any:
    emit, length = low.emit, low.cache_length
    zero, one = (emit.scalar(value, 2, torch.int32) for value in (0, 1))
    lengths = emit.shuffle("lengths", low.values["slots"], (-1, 1))
    slots = emit.constant("constant/slots", torch.arange(length, dtype=torch.int32)[None])
    row = emit.binary("row", "SUB", slots, lengths)  # [B, S]: which of the step's rows, or < 0
    width = emit.shuffle("width.2d", emit.size("width", positions, 1), (1, 1))
    committed = emit.binary("committed", "LESS", row, zero)
    own = emit.binary("own", "LESS", row, width)
    last = emit.binary("last", "SUB", width, one)
    clamped = emit.binary("at_most", "MIN", emit.binary("at_least", "MAX", row, zero), last)

    def per_row(name: str, x: Any) -> Any:
        return emit.shuffle(name, x, (0, 1, length))

    in_tree = emit.gather("in_tree", tree_mask, clamped, 2, batch_dims=1)  # [B, W, S]
    own_seen = emit.binary("own_seen", "AND", per_row("own.3d", own), in_tree)
    visible = emit.binary("visible", "OR", per_row("committed.3d", committed), own_seen)
    if window is not None:
        own_position = emit.gather("own_position", positions, clamped, 1, batch_dims=1)
        select = emit.network.add_select(committed, slots, own_position)
        key_position = emit.layer("key_position", select).get_output(0)
        row_position = emit.shuffle("row_position", positions, (0, 0, 1))
        edge = emit.binary("edge", "SUB", row_position, emit.scalar(window, 3, torch.int32))
        inside = emit.binary("inside", "GREATER", per_row("key_position.3d", key_position), edge)
        visible = emit.binary("visible_inside", "AND", visible, inside)
    axis = emit.constant("constant/int64/1/axis", torch.tensor([1]))
    layer = emit.network.add_unsqueeze(visible, axis)
    return emit.layer("visible.4d", layer).get_output(0)
