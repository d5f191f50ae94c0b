"""Where a graph learns what kind of weight each module holds, and how ranks share it."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from trtree.build.network.network import Activations, Owner, WeightKind

# How ranks share a linear: "column" splits each module's out_features, so that its result
# is split too; "row" splits in_features, and the ranks' partial results are summed. Experts
# are shared likewise: every rank holds its part of each.
Parallel = Literal["column", "row"]


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
        """Whether both can be rows of one weight."""
        return replace(self, shape=other.shape) == other and not self.pre_quant_scale


class WeightSource(Protocol):
    """Where a family learns what kind of weight each module holds."""

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        """``implied`` is the shape that config.json implies, for sources that hold no weights."""
