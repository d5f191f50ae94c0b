"""How a network's parts are divided among the ranks of a job, whatever runs them.

Heads are divided evenly; KV heads fewer than ranks are held by several each, and the query
heads that read one are divided among its holders. A recurrence's key heads take the value heads
that use them along. Other features are cut where the segments
of K end (``segment_bounds``), so that the linear that reads them has whole segments on every
rank: parts then differ by a block of 16 where the blocks do not divide evenly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from trtree.build.network.network import (
    Dim,
    Network,
    NetworkError,
    Op,
    Owner,
    State,
    Tensor,
    Weight,
)
from trtree.plugins.nvfp4_linear.format import BLOCK

SEGMENTS = 8  # of K, whatever the number of ranks
TILE = 16  # output columns that a rank's part of the vocabulary is made of

# How an op uses a weight: whole (None), or divided by rows of each module, by tiles of the
# vocabulary, or by columns.
Use = Literal["column", "vocabulary", "row"] | None


@dataclass(frozen=True)
class Shard:
    """One rank of a tensor-parallel engine."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> range:
        """This rank's of ``total`` things, as many on every rank.

        Raises:
            NetworkError: they do not divide.
        """
        if total % self.size:
            raise NetworkError(
                f"{what}: {total} does not divide among {self.size} ranks; use another tp"
            )
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def features(self, total: int, what: str) -> range:
        """This rank's features: whole blocks of 16 between ends of segments, or an even part
        of features that are no whole blocks.

        Raises:
            NetworkError: there are too few for some rank to have any, or they do not divide.
        """
        if total % BLOCK:
            return self.part(total, what)
        blocks = total // BLOCK
        if blocks < self.size:
            raise NetworkError(
                f"{what}: {total} are {blocks} blocks of {BLOCK}, too few for {self.size} ranks; "
                "lower tp"
            )
        first, end = (r * blocks // self.size for r in (self.rank, self.rank + 1))
        return range(first * BLOCK, end * BLOCK)

    def kv_heads(self, heads: int, what: str) -> range:
        """This rank's KV heads; ranks that outnumber them share one among several.

        Raises:
            NetworkError: neither number is a multiple of the other.
        """
        if self.size % heads == 0:
            own = self.rank * heads // self.size
            return range(own, own + 1)
        return self.part(heads, what)

    def state(self, state: State) -> State:
        """What a rank keeps of the state of an op on parts.

        Raises:
            NetworkError: its heads do not divide.
        """
        if state.kind == "latent":
            return state  # all heads share it
        if state.kind == "kv":
            own = self.kv_heads(state.heads, f"{state.name}: KV heads")
            return replace(state, heads=len(own))
        if state.kind == "recurrent":
            own = self.part(state.heads, f"{state.name}: heads")
            return replace(state, heads=len(own))
        own = self.part(state.head_dim, f"{state.name}: channels")
        return replace(state, head_dim=len(own))


WHOLE = Shard()  # one rank has it all


def segment_bounds(blocks: int) -> list[int]:
    """Where K of so many blocks is cut into segments."""
    return [i * blocks // SEGMENTS for i in range(SEGMENTS + 1)]


def vocabulary_bounds(size: int, ranks: int) -> list[int]:
    """The first column of every rank's logits, and their number: whole tiles, about as
    many for each."""
    tiles = -(-size // TILE)
    return [min(size, r * tiles // ranks * TILE) for r in range(ranks + 1)]


# Ops that run on a rank's own heads or features as they do on all of them.
ON_PARTS = frozenset(
    {"add", "causal_conv", "concat", "experts_down", "experts_linear", "experts_scale"}
    | {"experts_up", "gated_delta_net", "head_linear", "kv_append", "latent_attention"}
    | {"linear", "reshape", "rms_norm", "rotary_embedding", "scale", "sigmoid_mul"}
    | {"silu_mul", "split", "tree_attention"}
)
# Ops whose results are laid out by the heads that their operands are.
_LAID_OUT_ALIKE = frozenset({"add", "concat", "reshape", "split"})
# Ops whose first operand alone tells whether they run on a part: no rank has the weights of
# experts in part, and what factors add to experts_up is divided as its result is.
ROUTED = frozenset({"experts_down", "experts_linear", "experts_scale", "experts_up"})


@dataclass(frozen=True)
class Heads:
    """What a module's rows are of: ``parts`` one after another, each of ``count`` heads.

    parts: their sizes, or only how those compare. shared: ranks that outnumber the heads hold
    one among several.
    """

    count: int
    parts: tuple[int, ...] = (1,)
    shared: bool = False

    def rows(self, start: int, size: int, shard: Shard, what: str) -> tuple[range, ...]:
        """A rank's of the ``size`` rows from ``start``."""
        own = (shard.kv_heads if self.shared else shard.part)(self.count, what)
        ranges = []
        for part in self.parts:
            rows = size * part // sum(self.parts)
            per_head = rows // self.count
            ranges.append(range(start + own.start * per_head, start + own.stop * per_head))
            start += rows
        return tuple(ranges)


class Division:
    """What a network says about how its parts are divided.

    uses: by op, how its weights are used. kv_heads: by tensor, from a k or v projection
    to the cache, the KV heads of all ranks. heads: by tensor whose features are a recurrence's,
    its key heads. modules: by owner and module, the heads of its rows.
    """

    def __init__(self, network: Network, shard: Shard) -> None:
        self.network = network
        self.shard = shard
        self._producers = {name: op for op in network.ops for name in op.outputs}
        # By tensor, the kinds of ops that read it; of what is added, those that read the sum.
        readers: dict[str, set[str]] = {}
        for op in reversed(network.ops):
            for name in op.inputs:
                kinds = readers.get(op.outputs[0], set()) if op.kind == "add" else {op.kind}
                readers.setdefault(name, set()).update(kinds)
        self.uses: dict[str, Use] = {}
        for op in network.ops:
            parallel = op.attrs.get("parallel")
            read_by = readers.get(op.outputs[0], set()) if op.outputs else set()
            whole = parallel == "column" and not read_by <= ON_PARTS
            self.uses[op.name] = "vocabulary" if whole else parallel
        # Parts of features; parts of every head leave the heads as they are.
        self._splits = {
            op.inputs[0]: op.outputs
            for op in network.ops
            if op.kind == "split" and len(network.tensors[op.inputs[0]].shape) == 2
        }
        self._sums = {
            name: op.outputs[0] for op in network.ops if op.kind == "add" for name in op.inputs
        }
        self.kv_heads: dict[str, int] = {}
        self.heads: dict[str, int] = {}
        self.modules: dict[tuple[Owner, str], Heads] = {}
        for op in network.ops:
            self._note_heads(op)
            if op.kind == "kv_append" and op.state:
                for name in op.inputs[:2]:
                    self._follow(name, network.states[op.state].heads)

    def rows(self, weight: Weight) -> tuple[range, ...]:
        """A rank's rows of a weight that is divided by them, in order; see ``divided_rows``."""
        return tuple(chain(*divided_rows(weight, self.modules, self.shard)))

    def columns(self, weight: Weight) -> range:
        """A rank's columns of a weight that is divided by them.

        Raises:
            NetworkError: they are no whole blocks of 16 of an NVFP4 weight.
        """
        k = weight.shape[-1]
        if weight.kind == "nvfp4" and k % BLOCK:
            raise NetworkError(
                f"{weight.name}: in_features {k} are no whole blocks of {BLOCK} to divide among "
                f"{self.shard.size} ranks"
            )
        return self.shard.features(k, f"{weight.name}: in_features")

    def part(self, op: Op, tensor: Tensor) -> Tensor:
        """The result of an op on parts, with this rank's features, or heads, of it.

        Raises:
            NetworkError: it does not divide, or not at the ends of heads.
        """
        if op.kind == "experts_linear":
            parts = self.rows(self.network.weights[op.weights[0]])
            return Tensor(tensor.name, (*tensor.shape[:2], sum(map(len, parts))), tensor.dtype)
        in_slots = op.kind in ("scale", "experts_scale") and len(tensor.shape) == 3
        if op.kind == "experts_up" or in_slots:  # [rows, slots, intermediate]
            *axes, features = tensor.shape
            part = self.shard.features(int(features), f"{tensor.name}: intermediate")
            return Tensor(tensor.name, (*axes, len(part)), tensor.dtype)
        rows, _, *rest = tensor.shape
        part_shape = (rows, self.extent(tensor.name), *rest)
        if op.kind == "reshape":
            before = self._size((rows, self.extent(op.inputs[0]), *self._shape(op.inputs[0])[2:]))
            if before != self._size(part_shape):
                raise NetworkError(
                    f"{op.name}: a rank's {before} features of {self._size(tensor.shape)} are no "
                    f"whole heads, as those do not end on blocks of {BLOCK}"
                )
        return Tensor(tensor.name, part_shape, tensor.dtype)

    def extent(self, name: str) -> int:
        """This rank's features of a divided tensor [rows, features], or heads of one [rows,
        heads, head_dim]."""
        _, whole, *rest = self._shape(name)
        total = int(whole)
        if name in self._sums:
            return self.extent(self._sums[name])
        if name in self.kv_heads:
            heads = self.kv_heads[name]
            return total // heads * len(self.shard.kv_heads(heads, f"{name}: KV heads"))
        if rest:
            return len(self.shard.part(total, f"{name}: heads"))
        if name in self.heads:
            heads = self.heads[name]
            return total // heads * len(self.shard.part(heads, f"{name}: key heads"))
        if name in self._splits:
            return sum(map(self.extent, self._splits[name]))
        if self.uses[self._producers[name].name] == "vocabulary":
            return len(self.shard.part(total, f"{name}: logits"))
        return len(self.shard.features(total, f"{name}: features"))

    def _note_heads(self, op: Op) -> None:
        """Of ops that say what their rows or channels are, and of what is laid out like those."""
        if (heads := op.attrs.get("key_heads")) is not None:
            self.heads |= dict.fromkeys(op.outputs, heads)
            rows = Heads(heads, tuple(op.attrs.get("parts", (1,))))
            for name in op.weights:
                weight = self.network.weights[name]
                self.modules |= {(weight.owner, module): rows for module in weight.modules}
        elif op.kind in _LAID_OUT_ALIKE and all(name in self.heads for name in op.inputs):
            self.heads |= dict.fromkeys(op.outputs, self.heads[op.inputs[0]])

    def _follow(self, name: str, heads: int) -> None:
        """From the cache back to the projection."""
        while (op := self._producers.get(name)) is not None:
            self.kv_heads[name] = heads
            if op.kind in ("linear", "split", "add"):
                module = op.outputs.index(name) if op.kind == "split" else 0
                self._note_projections(op.inputs[0] if op.kind == "split" else name, module, heads)
                return
            name = op.inputs[0]

    def _note_projections(self, name: str, module: int, heads: int) -> None:
        """Of the linears whose result ``name`` is, or whose sum."""
        op = self._producers[name]
        if op.kind == "add":
            for part in op.inputs:
                self._note_projections(part, module, heads)
        elif op.kind == "linear":
            weight = self.network.weights[op.weights[0]]
            self.modules[weight.owner, weight.modules[module]] = Heads(heads, shared=True)

    def _shape(self, name: str) -> tuple[Dim, ...]:
        return self.network.tensors[name].shape

    @staticmethod
    def _size(shape: tuple[Dim, ...]) -> int:
        """Numbers per row."""
        size = 1
        for dim in shape[1:]:
            size *= int(dim)
        return size


def divided_rows(
    weight: Weight, modules: Mapping[tuple[Owner, str], Heads], shard: Shard
) -> tuple[tuple[range, ...], ...]:
    """A rank's rows of a weight that is divided by them, by module; of stacked experts, of each
    of them. ``modules``: by owner and module, the heads of its rows, where it has any."""
    ranges = []
    for index, (module, size) in enumerate(zip(weight.modules, weight.sizes, strict=False)):
        start = sum(weight.sizes[:index])
        heads = modules.get((weight.owner, module))
        if heads is not None:
            kind = "KV" if heads.shared else "key"
            ranges.append(heads.rows(start, size, shard, f"{module}: {kind} heads"))
            continue
        part = shard.features(size, f"{module}: out_features")
        ranges.append((range(start + part.start, start + part.stop),))
    return tuple(ranges)
