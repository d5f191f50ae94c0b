"""The gated delta rule as TensorRT plugins: `trtree::gated_delta_decay` and
`trtree::gated_delta_net`. Not yet run: see ``plugins/tensorrt_plugin.py``. The committed state is
read alone; commit runs outside the engine, on what the rows leave.
"""

from typing import Any

from trtree.plugins.gated_delta_net import tiles
from trtree.plugins.gated_delta_net.specs import DeltaConfig, decay_spec, delta_spec
from trtree.plugins.tensorrt_plugin import Named, Plugin, PluginLayer, Tensors

Layer = PluginLayer[DeltaConfig]


def _decay_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    rows = x["a"].shape_expr[0]
    return (trtp.from_shape_expr((rows, layer.config.heads), trt.float32),)


def _delta_outputs(trt: Any, trtp: Any, x: Tensors, layer: Layer) -> tuple[Any, ...]:
    rows, config = x["v"].shape_expr[0], layer.config
    update = trtp.from_shape_expr((rows, config.heads, config.value_dim), trt.float32)
    return update, x["v"].like()


def _strides(x: Tensors, layer: DeltaConfig) -> tuple[Any, ...]:
    """From row to row, of q, k, v and b."""
    keys = layer.heads // layer.group * layer.key_dim
    return keys, keys, layer.heads * layer.value_dim, layer.heads


_EXAMPLE = DeltaConfig(128, 128, 48, 3)

DECAY = Plugin(
    "gated_delta_decay",
    ("decay",),
    lambda layer, sm: decay_spec(layer),
    _decay_outputs,
    grid=lambda trtp, x, of: (
        x["requests"].shape_expr[0],
        trtp.cdiv(x["a"].shape_expr[0], tiles.DECAY_ROWS),  # one request may have all rows
    ),
    scalars=lambda x, of: (of.heads, x["packed_mask"].shape_expr[1]),
    example=_EXAMPLE,
)
DELTA = Plugin(
    "gated_delta_net",
    ("update", "out"),
    delta_spec,
    _delta_outputs,
    grid=lambda trtp, x, of: (
        x["requests"].shape_expr[0],
        of.config.heads,
        -(-of.config.value_dim // tiles.VALUE_COLUMNS),
    ),
    scalars=lambda x, of: (*_strides(x, of), x["packed_mask"].shape_expr[1]),
    example=_EXAMPLE,
)
PLUGINS: tuple[Plugin[Any], ...] = (DECAY, DELTA)


def add_delta_net(
    network: Any, trtp: Any, layer: Layer, tensors: Tensors, named: Named | None = None
) -> dict[str, Any]:
    """Both layers on the network's tensors, named as the kernels' arguments and contiguous.

    Returns ``out`` [rows, heads, value_dim], and what a commit needs beside the keys: ``update``
    float32 [rows, heads, value_dim] and ``decay`` float32 [rows, heads].
    """
    decay = DECAY.add(network, trtp, layer, tensors, named)
    return decay | DELTA.add(network, trtp, layer, {**tensors, **decay}, named)
