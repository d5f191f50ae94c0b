"""The convolution as a TensorRT plugin, `trtree::causal_conv`. Not yet run: see
``plugins/tensorrt_plugin.py``. Its commit runs outside the engine.
"""

from typing import Any

from trtree.plugins.causal_conv import tiles
from trtree.plugins.causal_conv.specs import ConvLayer, conv_spec
from trtree.plugins.tensorrt_plugin import Plugin

CONV = Plugin(
    "causal_conv",
    ("out",),
    lambda layer, sm: conv_spec(layer),
    lambda trt, trtp, x, of: (x["x"].like(),),
    grid=lambda trtp, x, of: (
        trtp.cdiv(x["x"].shape_expr[0], tiles.ROWS),
        trtp.cdiv(x["x"].shape_expr[1], tiles.CHANNELS),
    ),
    # Rows, channels, and from row to row.
    scalars=lambda x, of: (*x["x"].shape_expr, x["x"].shape_expr[1]),
    example=ConvLayer(4),
)
PLUGINS: tuple[Plugin[Any], ...] = (CONV,)
