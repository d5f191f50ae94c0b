"""The kernels as TensorRT plugins: `trtree::latent_append`, `trtree::latent_tree_attention` and
`trtree::latent_combine`. Not yet run: see ``plugins/tensorrt_plugin.py``.
"""

from typing import Any

from trtree.plugins.mla_attention.kernels.plugin_append import latent_append_plugin_kernel
from trtree.plugins.mla_attention.specs import (
    AppendLayer,
    LatentLayer,
    append_spec,
    attention_spec,
    combine_spec,
)
from trtree.plugins.mla_attention.tiles import APPEND_ROWS, LatentTile, latent_tile
from trtree.plugins.tensorrt_plugin import Named, Plugin, PluginLayer, Tensors, in_place
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.tensorrt_plugin import merged_outputs, partial_outputs

Layer = PluginLayer[LatentLayer]


def _append_spec(layer: AppendLayer, sm: int) -> KernelSpec:
    return in_place(append_spec(layer), latent_append_plugin_kernel, {"cache_in": "cache"})


def _append_outputs(
    trt: Any, trtp: Any, x: Tensors, layer: PluginLayer[AppendLayer]
) -> tuple[Any, ...]:
    return x["q"].like(), x["cache_in"].aliased()


def _tile(layer: Layer) -> LatentTile:
    config = layer.config
    return latent_tile(layer.sm, config.rows, config.heads, selected=config.selected)


def _blocks(layer: Layer) -> int:
    return layer.config.heads // _tile(layer).group


def _attention_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    items, tile = x["work"].shape_expr[0], _tile(layer)
    return partial_outputs(trt, trtp, items, _blocks(layer), tile.block_m, layer.config.value_dim)


def _combine_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    config = layer.config
    return merged_outputs(trt, trtp, x, config.dtype, config.heads, config.value_dim)


_EXAMPLE = LatentLayer(16, 512, 64, 16, 1, 1.0, selected=False)

APPEND = Plugin(
    "latent_append",
    ("q_out", "cache"),
    _append_spec,
    _append_outputs,
    grid=lambda trtp, x, of: (
        trtp.cdiv(x["x"].shape_expr[0], APPEND_ROWS),
        1 + of.config.turned_heads,
    ),
    scalars=lambda x, of: (x["page_table"].shape_expr[1], x["x"].shape_expr[0]),
    example=AppendLayer(576, 16, 16, 512, 64),
)
ATTENTION = Plugin(
    "latent_tree_attention",
    ("partial_out", "partial_lse"),
    attention_spec,
    _attention_outputs,
    grid=lambda trtp, x, of: (x["work"].shape_expr[0], _blocks(of)),
    scalars=lambda x, of: (
        x["page_table"].shape_expr[1],
        x["packed_mask"].shape_expr[1],
        x["selection"].shape_expr[1],
    ),
    example=_EXAMPLE,
)
COMBINE = Plugin(
    "latent_combine",
    ("out", "lse"),
    combine_spec,
    _combine_outputs,
    grid=lambda trtp, x, of: (x["row_splits"].shape_expr[0], _blocks(of)),
    scalars=lambda x, of: (),
    example=_EXAMPLE,
)
PLUGINS: tuple[Plugin[Any], ...] = (APPEND, ATTENTION, COMBINE)


def add_append(
    network: Any,
    trtp: Any,
    layer: PluginLayer[AppendLayer],
    tensors: Tensors,
    named: Named | None = None,
) -> dict[str, Any]:
    """Write x [rows, dim] to the cache and turn it and q [rows, heads, dim]; outputs by name.

    A layer that turns no heads has no queries: ``q`` is then any tensor, and ``q_out`` is not
    written. ``cache`` is to be marked as a network output.
    """
    return APPEND.add(network, trtp, layer, tensors, named)


def add_attention(
    network: Any, trtp: Any, layer: Layer, tensors: Tensors, named: Named | None = None
) -> Any:
    """Attention and combine on the network's tensors, named as the kernels' arguments: the
    result [rows, heads, value_dim]. Without a selection, any int32 matrix stands for it."""
    partial = ATTENTION.add(network, trtp, layer, tensors, named)
    return COMBINE.add(network, trtp, layer, {**tensors, **partial}, named)["out"]
