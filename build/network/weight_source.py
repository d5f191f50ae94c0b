"""Where a graph learns what kind of weight each module holds, and how ranks share it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

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


class LowRank(NamedTuple):
    """Factors whose product is added to a weight (SVDQuant): y = W x + B (A x).

    A is [rank, in_features]; modules that share A have the same ``digest``.
    """

    rank: int
    digest: str


@dataclass(frozen=True)
class WeightInfo:
    """What a weight source knows of a module before its weight is read.

    shape is [out_features, in_features], or [features] for a vector. pre_quant_scale: a
    digest of the vector that the module's input is multiplied by first. low_rank: what the
    weight's factors are, which take that input too.
    """

    kind: WeightKind
    shape: tuple[int, ...]
    dtype: str
    has_bias: bool = False
    activations: Activations | None = None  # None for dense weights
    pre_quant_scale: str | None = None
    low_rank: LowRank | None = None

    def fuses_with(self, other: "WeightInfo") -> bool:
        """Whether both can be rows of one weight, which takes one input."""
        return replace(self, shape=other.shape) == other

    def is_like(self, other: "WeightInfo") -> bool:
        """Whether both are the same but for their shape and for the values of what scales their
        inputs, or adds to their weights."""
        if self == other:  # as most experts are, and there are tens of thousands
            return True
        return _kind(self) == _kind(other)


def _kind(info: WeightInfo) -> WeightInfo:
    low_rank = info.low_rank and info.low_rank._replace(digest="")
    return replace(info, shape=(), pre_quant_scale=None, low_rank=low_rank)


class WeightSource(Protocol):
    """Where a family learns what kind of weight each module holds."""

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        """``implied`` is the shape that config.json implies, for sources that hold no weights."""
