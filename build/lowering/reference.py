"""The reference lowering: torch, one function per op, and the oracle of the others.

Every op computes in float64 and rounds its result once to the network's dtype, so
that a row does not depend on what shares its batch and other lowerings have one
clear number to come close to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtree.build.network.network import Network, NetworkError, Op
from trtree.plugins.dense_linear.reference import DenseLinear
from trtree.plugins.nvfp4_linear.reference import Nvfp4Linear
from trtree.plugins.tree_attention import reference as attention
from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32}

LinearImpl = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepContext:
    """What ops with state see of the current step."""

    caches: Mapping[str, PagedKv]  # by state name
    segments: Sequence[AttentionSegment]


class ReferenceNetwork:
    """A network with its weights, ready to run.

    Args:
        network: what to run.
        dense: dense weights by weight name, as stored.
        linears: an implementation per linear weight, float32 [rows, in] -> [rows, out].
    """

    def __init__(
        self,
        network: Network,
        dense: Mapping[str, torch.Tensor],
        linears: Mapping[str, LinearImpl],
    ) -> None:
        unknown = sorted({op.kind for op in network.ops} - set(_OPS))
        if unknown:
            raise NetworkError(f"{network.name}: the reference lowering has no {unknown}")
        self.network = network
        self._dense = dense
        self._linears = linears
        self._constants = {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in network.constants.items()
        }
        self._last_use = _last_uses(network)

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        context: StepContext,
        observe: Callable[[Op, list[torch.Tensor]], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run all ops; returns the outputs by role. ``observe`` sees every op's results."""
        values = {name: inputs[name] for name in self.network.inputs}
        results = {}
        roles = {tensor: role for role, tensor in self.network.outputs.items()}
        for index, op in enumerate(self.network.ops):
            operands = [values[name] for name in op.inputs]
            outputs = _OPS[op.kind](self, op, operands, context)
            for name, value in zip(op.outputs, outputs, strict=True):
                values[name] = value
                if name in roles:
                    results[roles[name]] = value
            if observe:
                observe(op, outputs)
            for name in self._last_use[index]:
                values.pop(name, None)
        return results

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Round a wider result once to the network's dtype."""
        return x.to(TORCH_DTYPES[self.network.dtype])

    def dense(self, op: Op) -> torch.Tensor:
        return self._dense[op.weights[0]]

    def linear(self, op: Op) -> LinearImpl:
        return self._linears[op.weights[0]]

    def constant(self, name: str) -> torch.Tensor:
        return self._constants[name]


def make_linear(kind: str, weight: Any, activations: str) -> LinearImpl:
    """The implementation of one linear: dense tensor or NVFP4, see the plugins' contracts."""
    raise NotImplementedError


def _last_uses(network: Network) -> list[list[str]]:
    """Per op, the tensors that no later op reads."""
    last = {}
    for index, op in enumerate(network.ops):
        for name in (*op.inputs, *op.outputs):
            last[name] = index
    released: list[list[str]] = [[] for _ in network.ops]
    for name, index in last.items():
        released[index].append(name)
    return released
