"""A layer of a finished network as its semantics read it, and the values it computes.

Layers take operands as they are stored and return results yet to be rounded: everything is
computed in float64 (integers in int64) and rounded once. FP4 tensors are held as float32
values of E2M1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)

Tensors = list[torch.Tensor]
Operands = Sequence[Any]


class UnknownLayerError(NotImplementedError):
    """The evaluator has no semantics for a layer or one of its attributes."""


@dataclass
class Layer:
    """layer: with its own class, so that its attributes can be read."""

    name: str
    kind: str
    layer: Any
    inputs: list[str | None]
    outputs: list[str]
    dtypes: list[str]
    constant: set[int] = field(default_factory=set)  # operands that no run changes
    _wide: dict[int, torch.Tensor] = field(default_factory=dict)

    def double(self, operand: int, value: torch.Tensor) -> torch.Tensor:
        """The operand in float64; kept for constants, which would be widened at every run."""
        if operand not in self.constant:
            return value.double()
        if operand not in self._wide:
            self._wide[operand] = value.double()
        return self._wide[operand]


LayerFunction = Callable[[Layer, Operands], Tensors]


TORCH_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FP8": torch.float8_e4m3fn,
    "FP4": torch.float32,
}


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x.long()


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Once, to nearest even; FP8 and FP4 saturate."""
    if dtype == "FP8":
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    if dtype == "FP4":
        return _round_fp4(x).float()
    return x.to(TORCH_TYPES[dtype])


def _round_fp4(x: torch.Tensor) -> torch.Tensor:
    magnitude = x.double().abs().clamp(max=6.0)
    upper = torch.bucketize(magnitude, E2M1).clamp(max=7)
    lower = (upper - 1).clamp(min=0)
    to_upper, to_lower = E2M1[upper] - magnitude, magnitude - E2M1[lower]
    take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0))
    return torch.where(take_upper, E2M1[upper], E2M1[lower]) * torch.sign(x)


def unpack_fp4(memory: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype != "FP4":
        return memory
    nibbles = torch.stack([memory & 15, memory >> 4], dim=-1).flatten(-2).long()
    sign = torch.where(nibbles >= 8, -1.0, 1.0)
    return (E2M1[nibbles % 8] * sign).float()
