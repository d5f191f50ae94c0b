"""The kernels as TensorRT plugins: `trtree::tree_kv_append`, `trtree::tree_attention` and
`trtree::tree_attention_combine`. Not yet run: see ``plugins/tensorrt_plugin.py``.
"""

from typing import Any

from trtree.plugins.tensorrt_plugin import Named, Plugin, PluginLayer, Tensors, in_place
from trtree.plugins.tree_attention.aot import KernelSpec
from trtree.plugins.tree_attention.kernels.plugin_append import tree_kv_append_plugin_kernel
from trtree.plugins.tree_attention.specs import (
    LayerConfig,
    append_spec,
    attention_spec,
    combine_spec,
)
from trtree.plugins.tree_attention.tiles import APPEND_ROWS, attention_tile

Layer = PluginLayer[LayerConfig]


def _append_spec(layer: LayerConfig, sm: int) -> KernelSpec:
    caches = {"k_cache_in": "k_cache", "v_cache_in": "v_cache"}
    return in_place(append_spec(layer, sm), tree_kv_append_plugin_kernel, caches)


def _append_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    return x["q"].like(), x["k_cache_in"].aliased(), x["v_cache_in"].aliased()


def _attention_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    items, config = x["work"].shape_expr[0], layer.config
    tile = attention_tile(layer.sm, config.head_dim, config.rows, config.group)
    return partial_outputs(trt, trtp, items, config.kv_heads, tile.block_m, config.head_dim)


def partial_outputs(
    trt: Any, trtp: Any, items: Any, blocks: int, block_m: int, value_dim: int
) -> tuple[Any, Any]:
    """A plugin has no workspace: the results of work items, and their weights, are outputs."""
    return (
        trtp.from_shape_expr((items, blocks, block_m, value_dim), trt.float32),
        trtp.from_shape_expr((items, blocks, block_m), trt.float32),
    )


def merged_outputs(
    trt: Any, trtp: Any, x: Tensors, dtype: Any, heads: int, value_dim: int
) -> tuple[Any, Any]:
    """What combine leaves of them: [rows, heads, value_dim], and log-sum-exps [rows, heads]."""
    rows = x["row_splits"].shape_expr[0]
    element = getattr(trt, str(dtype).removeprefix("torch."))
    return (
        trtp.from_shape_expr((rows, heads, value_dim), element),
        trtp.from_shape_expr((rows, heads), trt.float32),
    )


def _combine_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    config = layer.config
    heads = config.kv_heads * config.group
    return merged_outputs(trt, trtp, x, config.dtype, heads, config.head_dim)


_EXAMPLE = LayerConfig(128, 1, 1, 16, 1, 1.0, 128)

APPEND = Plugin(
    "tree_kv_append",
    ("q_out", "k_cache", "v_cache"),
    _append_spec,
    _append_outputs,
    grid=lambda trtp, x, of: (trtp.cdiv(x["q"].shape_expr[0], APPEND_ROWS), of.config.kv_heads),
    scalars=lambda x, of: (x["page_table"].shape_expr[1], x["q"].shape_expr[0]),
    example=_EXAMPLE,
)
ATTENTION = Plugin(
    "tree_attention",
    ("partial_out", "partial_lse"),
    attention_spec,
    _attention_outputs,
    grid=lambda trtp, x, of: (x["work"].shape_expr[0], of.config.kv_heads),
    scalars=lambda x, of: (x["page_table"].shape_expr[1], x["packed_mask"].shape_expr[1]),
    example=_EXAMPLE,
)
COMBINE = Plugin(
    "tree_attention_combine",
    ("out", "lse"),
    combine_spec,
    _combine_outputs,
    grid=lambda trtp, x, of: (x["row_splits"].shape_expr[0], of.config.kv_heads),
    scalars=lambda x, of: (),
    example=_EXAMPLE,
)
PLUGINS = (APPEND, ATTENTION, COMBINE)


def add_append(
    network: Any, trtp: Any, layer: Layer, tensors: Tensors, named: Named | None = None
) -> dict[str, Any]:
    """Append alone, as a drafter's context wants it; returns its outputs by name.

    A layer with a ``group`` of 0 has no queries: ``q`` is then any tensor of as many rows, and
    ``q_out`` is not written.
    """
    return APPEND.add(network, trtp, layer, tensors, named)


def add_attention(
    network: Any, trtp: Any, layer: Layer, tensors: Tensors, named: Named | None = None
) -> dict[str, Any]:
    """The three layers on the network's tensors, named as the kernels' arguments.

    Returns those and the outputs, of which ``q`` is turned, ``out`` [rows, heads, head_dim] the
    result, and ``k_cache`` and ``v_cache`` are to be marked as network outputs.
    """
    known = dict(tensors)
    for plugin in PLUGINS:
        known |= plugin.add(network, trtp, layer, known, named)
        if layer.config.rotary_dim:  # else append leaves q alone, and q_out unwritten
            known["q"] = known["q_out"]
    return known
