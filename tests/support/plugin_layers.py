"""What the plugins' layers compute: their kernels' contract, in float64.

Written from the kernels' arguments, so that page tables, slots, masks and work items mean
here what they mean there. What a kernel leaves unwritten is NaN.
"""

from collections.abc import Sequence

import torch

import attention_layers
import branch_layers
import latent_layers
from trtree.plugins.registry import PLUGINS

_PLUGINS = {plugin.name: plugin for plugin in PLUGINS}
_LAYERS = attention_layers.LAYERS | latent_layers.LAYERS | branch_layers.LAYERS


def plugin_layer(
    plugin: str, attribute: str, operands: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs, yet to be rounded; the caches are the operands, written in place."""
    known = _PLUGINS[plugin]
    tensors = dict(zip(known.input_names, operands, strict=True))
    return _LAYERS[plugin](known.layer(attribute), tensors)
