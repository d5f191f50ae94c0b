"""The kernels as TensorRT plugins: `trtree::index_scores` and `trtree::index_top_k`. Not yet
run: see ``plugins/tensorrt_plugin.py``.
"""

from typing import Any

from trtree.plugins.sparse_indexer.specs import (
    IndexLayer,
    TopKLayer,
    scores_spec,
    top_k_spec,
)
from trtree.plugins.tensorrt_plugin import Named, Plugin, PluginLayer, Tensors


def _scores_outputs(
    trt: Any, trtp: Any, x: Tensors, layer: PluginLayer[IndexLayer]
) -> tuple[Any, ...]:
    rows = x["q"].shape_expr[0]
    return (trtp.from_shape_expr((rows, _width(x, layer.config)), trt.float32),)


def _width(x: Tensors, layer: IndexLayer) -> Any:
    """A request's slots at most: those of its page table."""
    return x["page_table"].shape_expr[1] * layer.page_size


def _top_k_outputs(
    trt: Any, trtp: Any, x: Tensors, layer: PluginLayer[TopKLayer]
) -> tuple[Any, ...]:
    rows = x["lengths"].shape_expr[0]
    return (
        trtp.from_shape_expr((rows, layer.config.top_k), trt.int32),
        trtp.from_shape_expr((rows,), trt.int32),
    )


SCORES = Plugin(
    "index_scores",
    ("scores",),
    scores_spec,
    _scores_outputs,
    grid=lambda trtp, x, of: (x["work"].shape_expr[0], 1),
    scalars=lambda x, of: (
        x["page_table"].shape_expr[1],
        x["packed_mask"].shape_expr[1],
        _width(x, of),
    ),
    example=IndexLayer(16, 128, 16, 1),
)
TOP_K = Plugin(
    "index_top_k",
    ("selection", "nan_counts"),
    lambda layer, sm: top_k_spec(),
    _top_k_outputs,
    grid=lambda trtp, x, of: (x["lengths"].shape_expr[0], 1),
    scalars=lambda x, of: (x["scores"].shape_expr[1], of.top_k),
    example=TopKLayer(1),
)
PLUGINS: tuple[Plugin[Any], ...] = (SCORES, TOP_K)


def add_selection(
    network: Any,
    trtp: Any,
    layer: PluginLayer[IndexLayer],
    top_k: int,
    tensors: Tensors,
    named: Named | None = None,
) -> dict[str, Any]:
    """Both layers on the network's tensors, named as the kernels' arguments; ``cache`` is
    append's output, and holds the rows' own keys.

    Returns ``selection`` int32 [rows, top_k] and ``nan_counts`` int32 [rows], which the caller
    has to look at.
    """
    scores = SCORES.add(network, trtp, layer, tensors, named)
    choice = PluginLayer(TopKLayer(top_k), layer.sm)
    return TOP_K.add(network, trtp, choice, {**tensors, **scores}, named)
