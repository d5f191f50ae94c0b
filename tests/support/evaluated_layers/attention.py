"""RoPE, the KV cache, attention, the plugins in its place, and the choice of the largest."""

import torch

from evaluated_layers.layer import Layer, LayerFunction, Operands, Tensors, UnknownLayerError
from plugin_layers import plugin_layer


def _rotary(layer: Layer, x: Operands) -> Tensors:
    """x [B, heads, W, D], tables [positions, D / 2], position ids [B, W]."""
    value, cos, sin, ids = x
    turning = layer.layer.rotary_embedding_dim or value.shape[-1]
    cos, sin = (table.double()[ids.long()].unsqueeze(1) for table in (cos, sin))
    wide = value.double()
    turned, rest = wide[..., :turning], wide[..., turning:]
    if layer.layer.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = turned[..., : turning // 2], turned[..., turning // 2 :]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return [torch.cat([turned, rest], dim=-1)]


def _kv_cache_update(layer: Layer, x: Operands) -> Tensors:
    """Writes update [B, heads, W, D] into cache [B, heads, S, D] from each write index on, in
    place. Outside the cache TensorRT drops rows silently; here that is an error."""
    cache, update, indices = x
    if layer.layer.cache_mode.name != "LINEAR":
        raise UnknownLayerError(f"{layer.name}: cache mode {layer.layer.cache_mode}")
    for entry, rows, start in zip(cache, update, indices.tolist(), strict=True):
        if start < 0 or start + rows.shape[1] > entry.shape[1]:
            raise IndexError(
                f"{layer.name}: rows {start} to {start + rows.shape[1]} of {entry.shape[1]}"
            )
        entry[:, start : start + rows.shape[1]] = rows
    return [cache]


def _attention_input(layer: Layer, x: Operands) -> Tensors:
    """softmax(q k^T + mask) v over groups of query heads; no scaling."""
    of = layer.layer.attention
    q, k, v, mask = x
    if of.causal or of.norm_op.name != "SOFTMAX" or mask.dtype != torch.bool:
        raise UnknownLayerError(f"{layer.name}: causal {of.causal}, {of.norm_op}, {mask.dtype}")
    # Only keys that some row sees; the others have weight zero (and must be finite).
    for name, cache in (("key", k), ("value", v)):
        if not torch.isfinite(cache).all():
            raise FloatingPointError(f"{layer.name}: a {name} in the cache is not finite")
    used = int(mask.any(dim=(0, 1, 2)).nonzero().max()) + 1
    groups = q.shape[1] // k.shape[1]
    wide = q.double().unflatten(1, (k.shape[1], groups))
    scores = torch.einsum("bhgwd,bhsd->bhgws", wide, k[:, :, :used].double())
    scores = scores.masked_fill(~mask[:, :, None, :, :used], -torch.inf)
    attended = torch.einsum("bhgws,bhsd->bhgwd", scores.softmax(-1), v[:, :, :used].double())
    return [attended.flatten(1, 2)]


def _pass(layer: Layer, x: Operands) -> Tensors:
    return [x[0]]


def _top_k(layer: Layer, x: Operands) -> Tensors:
    """Equal values by index; TensorRT promises no order."""
    of = layer.layer
    if of.op.name != "MAX" or of.axes != 1 << (x[0].ndim - 1):
        raise UnknownLayerError(f"{layer.name}: {of.op} over axes {of.axes}")
    order = torch.sort(x[0].double(), dim=-1, descending=True, stable=True)
    return [order.values[..., : of.k], order.indices[..., : of.k]]


def _plugin(layer: Layer, x: Operands) -> Tensors:
    return plugin_layer(layer.layer.plugin, layer.layer.attribute, x)


LAYERS: dict[str, LayerFunction] = {
    "ATTENTION_INPUT": _attention_input,
    "ATTENTION_OUTPUT": _pass,
    "KV_CACHE_UPDATE": _kv_cache_update,
    "PLUGIN_V3": _plugin,
    "ROTARY_EMBEDDING": _rotary,
    "TOPK": _top_k,
}
