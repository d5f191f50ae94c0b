"""Which weights of a set of networks are stored, and how the others are part of them.

The drafter's context pass fuses the keys and values of all layers into one product,
its block pass those of one layer: the latter are rows of the former, stored once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from trtree.build.checkpoint import LinearWeight, StoredLinear
from trtree.build.network.network import Network, Owner, Weight, tensor_name
from trtree.plugins.nvfp4_linear.format import QuantizedTensor, dequantize


class WeightReader(Protocol):
    """Where lowerings read weights from: a Checkpoint, or what stands for one."""

    def tensor(self, tensor_name: str) -> torch.Tensor: ...
    def linear(self, modules: Sequence[str]) -> LinearWeight: ...
    def stored_linear(self, modules: Sequence[str]) -> StoredLinear: ...


class View(NamedTuple):
    """Rows ``first_row`` to ``first_row + num_rows`` of a stored weight's out_features."""

    stored: str
    first_row: int
    num_rows: int


def read_linear(weight: Weight, modules: Sequence[str], checkpoint: WeightReader) -> LinearWeight:
    """Some of the weight's modules as it is stored: one that is dense is dequantized where the
    checkpoint's is not."""
    linear = checkpoint.linear(modules)
    if weight.kind == "nvfp4" or not isinstance(linear.weight, QuantizedTensor):
        return linear
    dense = dequantize(linear.weight)
    if linear.smoothing is not None:
        dense = linear.smoothing.whole(dense)
    dense = dense.to(getattr(torch, weight.dtype))
    return LinearWeight("dense", dense, None, linear.bias, linear.segment_bounds)


class WeightPlan(NamedTuple):
    """stored: the weights that take memory; views: every weight as a part of one of them."""

    stored: dict[str, Weight]
    views: dict[str, View]


def read_vector(weight: Weight, checkpoint: WeightReader) -> torch.Tensor:
    """A vector, or several after one another, in its stored dtype and with its offset.

    A depthwise convolution's [channels, 1, kernel] is read as one, channel by channel.
    """
    dtype: torch.dtype = getattr(torch, weight.dtype)
    parts = [checkpoint.tensor(tensor_name(module)).reshape(-1) for module in weight.modules]
    vector = torch.cat([part.to(dtype) for part in parts])
    return vector + weight.offset if weight.offset else vector


def plan_weights(networks: Iterable[Network]) -> WeightPlan:
    """Collect the weights of all networks, keeping of nested ones only the outermost."""
    weights = {name: weight for network in networks for name, weight in network.weights.items()}
    plan = WeightPlan({}, {})
    placed: dict[tuple[Owner, str], tuple[Weight, int]] = {}  # where each module is stored
    for weight in sorted(weights.values(), key=lambda w: -len(w.modules)):
        view = plan.views[weight.name] = _place(weight, placed)
        if view.stored == weight.name:
            plan.stored[weight.name] = weight
            for index, module in enumerate(weight.modules):
                placed.setdefault((weight.owner, module), (weight, index))
    return plan


def _place(weight: Weight, placed: Mapping[tuple[Owner, str], tuple[Weight, int]]) -> View:
    outer, at = placed.get((weight.owner, weight.modules[0]), (weight, 0))
    if outer.modules[at : at + len(weight.modules)] == weight.modules:
        return View(outer.name, sum(outer.out_sizes[:at]), weight.num_rows)
    return View(weight.name, 0, weight.num_rows)
