"""Where a graph learns what kind of weight each module holds, and how ranks share it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from trtree.build.network.network import Activations, Owner, WeightKind

# How ranks share a linear: "column" splits each module's out_features, so that its result
# is split too; "row" splits in_features, and the ranks' partial results are summed. Experts
# are shared likewise: every rank holds its part of each.
Parallel = Literal["column", "row"]

# The scales of keys and of values of an FP8 cache, by the scope of its attention.
KvScales = Callable[[str], tuple[float, float]]


@dataclass(frozen=True)
class KeyHeads:
    """What ranks divide features by: a recurrence's key heads, ``count`` of them. The features
    are ``parts`` one after another, each of that many heads, or of what belongs to them."""

    count: int
    parts: tuple[int, ...] = (1,)

    def attrs(self) -> dict[str, Any]:
        """Of an op that has such features."""
        return {"parallel": "column", "key_heads": self.count, "parts": list(self.parts)}


@dataclass(frozen=True)
class WeightInfo:
    """What a weight source knows of a module from headers or configuration alone.

    shape is [out_features, in_features], or [features] for a vector.
    """

    kind: WeightKind
    shape: tuple[int, ...]
    dtype: str
    has_bias: bool = False
    activations: Activations | None = None  # None for dense weights
    pre_quant_scale: bool = False  # the input is multiplied by the module's own vector first

    def fuses_with(self, other: "WeightInfo") -> bool:
        """Whether both can be rows of one weight, whatever scales their inputs."""
        return self.is_like(other) and not self.pre_quant_scale

    def is_like(self, other: "WeightInfo") -> bool:
        """Whether both are the same but for their shape."""
        return replace(self, shape=other.shape) == other


class WeightSource(Protocol):
    """Where a family learns what kind of weight each module holds."""

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        """``implied`` is the shape that config.json implies, for sources that hold no weights."""
