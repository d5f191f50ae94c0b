"""Runs a plugin's own kernel, interpreted, on what its table tells TensorRT: arguments in
TensorRT's order, with the grid, integers and outputs of ``Plugin``, on the shapes at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl

from trtree.plugins.tensorrt_plugin import Plugin

_TYPES = SimpleNamespace(
    bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32, int32=torch.int32
)


@dataclass
class _Described:
    """A tensor as ``tensorrt.plugin`` describes it."""

    tensor: torch.Tensor

    @property
    def shape_expr(self) -> list[int]:
        return list(self.tensor.shape)

    def like(self) -> torch.Tensor:
        return unwritten(self.tensor.shape, self.tensor.dtype)

    def aliased(self) -> torch.Tensor:
        return self.tensor


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -(2**31), dtype=dtype)


def run_interpreted(
    plugin: Plugin[Any], attribute: str, operands: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs; what the kernel leaves unwritten is NaN, and caches are the operands."""
    layer = plugin.layer(attribute)
    described = {name: _Described(x) for name, x in zip(plugin.input_names, operands, strict=True)}
    trtp = SimpleNamespace(cdiv=lambda a, b: -(-a // b), from_shape_expr=unwritten)
    outputs = plugin.outputs(_TYPES, trtp, described, layer)
    spec = plugin.spec(layer.config, layer.sm)
    # Interpreted products of bfloat16 are garbage; float32 holds its values exactly.
    wide = {"DOT_DTYPE": tl.float32} if "DOT_DTYPE" in spec.constants else {}
    grid = tuple(plugin.grid(trtp, described, layer))
    integers = plugin.scalars(described, layer.config)
    spec.kernel[grid](*operands, *integers, *outputs, **dict(spec.constants) | wide)
    return list(outputs)
