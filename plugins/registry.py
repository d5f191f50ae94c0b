"""All of this project's TensorRT plugins."""

from pathlib import Path
from typing import Any

from trtree.plugins.causal_conv.tensorrt_plugin import PLUGINS as CAUSAL_CONV
from trtree.plugins.gated_delta_net.tensorrt_plugin import PLUGINS as GATED_DELTA_NET
from trtree.plugins.mla_attention.tensorrt_plugin import PLUGINS as LATENT_ATTENTION
from trtree.plugins.sparse_indexer.tensorrt_plugin import PLUGINS as INDEXER
from trtree.plugins.tensorrt_plugin import Plugin
from trtree.plugins.tree_attention.tensorrt_plugin import PLUGINS as TREE_ATTENTION

PLUGINS: tuple[Plugin[Any], ...] = (
    *TREE_ATTENTION,
    *LATENT_ATTENTION,
    *INDEXER,
    *CAUSAL_CONV,
    *GATED_DELTA_NET,
)


def register_plugins(trt: Any, trtp: Any, cache: Path | None = None) -> None:
    """Register all plugins with TensorRT, once per process.

    Args:
        trt, trtp: the modules ``tensorrt`` and ``tensorrt.plugin``.
        cache: folder of compiled kernels; default: the user's.
    """
    for plugin in PLUGINS:
        plugin.register(trt, trtp, cache)
