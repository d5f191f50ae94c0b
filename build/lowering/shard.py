"""One rank's part of the networks: heads, features and vocabulary divided among ranks.

Column-parallel linears give a rank its part of each module's out_features, so that
attention and gated activations run on a rank's own heads and features. Row-parallel ones
read that part and give the sums of the rank's own segments of K, which all ranks add in
the order of K: the bits are those of one rank. Logits are gathered before anything looks
at them, so token ids are global. Everything else is whole on every rank. A drafter is
divided like the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from trtree.build.checkpoint import LinearWeight
from trtree.build.lowering.weights import View, WeightPlan, WeightReader
from trtree.build.network.network import (
    Dim,
    Network,
    NetworkError,
    Op,
    Owner,
    Tensor,
    Weight,
)
from trtree.plugins.nvfp4_linear.format import BLOCK, QuantizedTensor

SEGMENTS = 8  # of K, whatever the number of ranks
TILE = 16  # output columns that a rank's part of the vocabulary is made of


@dataclass(frozen=True)
class Shard:
    """One rank of a tensor-parallel engine."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> int:
        """``total`` divided among the ranks.

        Raises:
            NetworkError: it does not divide.
        """
        if total % self.size:
            raise NetworkError(f"{what}: {total} does not divide among {self.size} ranks")
        return total // self.size

    def of(self, tensor: torch.Tensor, axis: int, what: str) -> torch.Tensor:
        """This rank's part of ``axis``."""
        length = self.part(tensor.shape[axis], what)
        return tensor.narrow(axis, self.rank * length, length)


WHOLE = Shard()  # one rank has it all


@dataclass(frozen=True)
class _Part:
    """What a rank stores of a linear: ranges of its rows (fused out_features) or of its
    columns (in_features); None: all of them."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None


@dataclass(frozen=True)
class RankNetworks:
    """What one rank runs and stores; ``readers`` cut the checkpoints' weights to it."""

    shard: Shard
    networks: Mapping[str, Network]
    weights: WeightPlan
    _parts: Mapping[tuple[Owner, tuple[str, ...]], _Part] = field(default_factory=dict)

    def readers(self, checkpoints: Mapping[Owner, WeightReader]) -> dict[Owner, WeightReader]:
        """The checkpoints as this rank sees them."""
        if not self._parts:
            return dict(checkpoints)
        return {
            owner: _PartReader(checkpoint, owner, self._parts, self.shard)
            for owner, checkpoint in checkpoints.items()
        }


def shard_networks(
    networks: Mapping[str, Network], weights: WeightPlan, shard: Shard
) -> RankNetworks:
    """Divide networks and their weights.

    Raises:
        NetworkError: something does not divide among the ranks; names it and both numbers.
    """
    if shard.size == 1:
        return RankNetworks(shard, networks, weights)
    if SEGMENTS % shard.size:
        raise NetworkError(
            f"tp {shard.size}: linears are reduced in {SEGMENTS} segments, which do not divide "
            f"among {shard.size} ranks; use 2, 4 or 8"
        )
    for network in networks.values():
        for op in network.ops:
            if op.kind in ("experts_up", "experts_down"):
                raise NetworkError(f"tp {shard.size}: {op.name}: experts run on one rank so far")
    local = {name: _NetworkShard(network, shard).network for name, network in networks.items()}
    plan = WeightPlan({}, {})
    parts: dict[tuple[Owner, tuple[str, ...]], _Part] = {}
    uses = _stored_uses(networks, weights)
    for weight in weights.stored.values():
        part = _part(weight, uses[weight.name], shard)
        parts[weight.owner, weight.modules] = part
        plan.stored[weight.name] = _cut(weight, part)
    for network in networks.values():
        for op in network.ops:
            use = _use(network, op)
            for name in op.weights:
                view = weights.views[name]
                stored = plan.stored[view.stored]
                part = parts[stored.owner, stored.modules]
                plan.views[_local_name(name, use)] = _view(
                    network.weights[name], use, view, stored, part, shard
                )
    return RankNetworks(shard, local, plan, parts)


def segment_bounds(blocks: int) -> list[int]:
    """Where K of so many blocks is cut into segments."""
    return [i * blocks // SEGMENTS for i in range(SEGMENTS + 1)]


def vocabulary_bounds(size: int, ranks: int) -> list[int]:
    """The first column of every rank's logits, and their number: whole tiles, about as
    many for each."""
    tiles = -(-size // TILE)
    return [min(size, r * tiles // ranks * TILE) for r in range(ranks + 1)]


# Weights

# How an op uses a weight: whole (None), or divided by rows of each module, by tiles of the
# vocabulary, or by columns.
_Use = Literal["column", "vocabulary", "row"] | None


def _use(network: Network, op: Op) -> _Use:
    parallel = op.attrs.get("parallel")
    if parallel is None:
        return None
    readers = [other.kind for other in network.ops if op.outputs[0] in other.inputs]
    if parallel == "column" and not set(readers) <= _ON_PARTS:
        return "vocabulary"
    return "row" if parallel == "row" else "column"


def _local_name(weight: str, use: _Use) -> str:
    return f"{weight}@{use}" if use else weight


def _stored_uses(networks: Mapping[str, Network], weights: WeightPlan) -> dict[str, set[_Use]]:
    """By stored weight, how its parts are used."""
    uses: dict[str, set[_Use]] = {}
    for network in networks.values():
        for op in network.ops:
            for name in op.weights:
                uses.setdefault(weights.views[name].stored, set()).add(_use(network, op))
    return uses


def _part(weight: Weight, uses: set[_Use], shard: Shard) -> _Part:
    """What a rank stores of a weight: its own part if every use is of one kind."""
    if None in uses:
        return _Part()
    if len(uses) > 1:
        raise NetworkError(f"{weight.name}: used both {' and '.join(sorted(map(str, uses)))}")
    if uses == {"row"}:
        return _Part(columns=_columns(weight, shard))
    if uses == {"vocabulary"}:
        bounds = vocabulary_bounds(weight.shape[0], shard.size)
        return _Part(rows=(range(*bounds[shard.rank : shard.rank + 2]),))
    starts = [sum(weight.out_sizes[:i]) for i in range(len(weight.out_sizes))]
    ranges = []
    for module, start, size in zip(weight.modules, starts, weight.out_sizes, strict=True):
        part = shard.part(size, f"{module}: out_features")
        ranges.append(range(start + shard.rank * part, start + (shard.rank + 1) * part))
    return _Part(rows=tuple(ranges))


def _columns(weight: Weight, shard: Shard) -> range:
    k = weight.shape[1]
    if k % (BLOCK * shard.size):
        raise NetworkError(
            f"{weight.name}: in_features {k} are {k / BLOCK:g} blocks of {BLOCK}, which do not "
            f"divide among {shard.size} ranks"
        )
    part = k // shard.size
    return range(shard.rank * part, (shard.rank + 1) * part)


def _cut(weight: Weight, part: _Part) -> Weight:
    if part.columns is not None:
        return replace(weight, shape=(weight.shape[0], len(part.columns)))
    if part.rows is None:
        return weight
    sizes = tuple(map(len, part.rows))
    return replace(weight, shape=(sum(sizes), *weight.shape[1:]), out_sizes=sizes)


def _view(weight: Weight, use: _Use, view: View, stored: Weight, part: _Part, shard: Shard) -> View:
    """Where a use's rows are in what the rank stores; ``view``: in the whole."""
    if use == "vocabulary" and part.rows is None:
        bounds = vocabulary_bounds(weight.shape[0], shard.size)
        first, end = bounds[shard.rank : shard.rank + 2]
        return View(stored.name, view.first_row + first, end - first)
    if part.rows is None:
        return view
    at = next(
        i
        for i in range(len(stored.modules))
        if stored.modules[i : i + len(weight.modules)] == weight.modules
    )
    sizes = stored.out_sizes
    return View(stored.name, sum(sizes[:at]), sum(sizes[at : at + len(weight.modules)]))


@dataclass(frozen=True)
class _PartReader:
    """A checkpoint of which linears are read in part."""

    checkpoint: WeightReader
    owner: Owner
    parts: Mapping[tuple[Owner, tuple[str, ...]], _Part]
    shard: Shard

    def tensor(self, tensor_name: str) -> torch.Tensor:
        whole = self.checkpoint.tensor(tensor_name)
        # Vectors that ranks divide, such as input scales, are named by their tensors.
        part = self.parts.get((self.owner, (tensor_name,)))
        if part is None or part.rows is None:
            return whole
        return torch.cat([whole[r.start : r.stop] for r in part.rows])

    def linear(self, modules: Sequence[str]) -> LinearWeight:
        linear = self.checkpoint.linear(modules)
        part = self.parts[self.owner, tuple(modules)]
        if part.columns is not None:
            return self._columns(linear, part.columns, modules[0])
        if part.rows is None:
            return linear
        rows = torch.cat([torch.arange(r.start, r.stop) for r in part.rows])
        weight: torch.Tensor | QuantizedTensor
        if isinstance(linear.weight, QuantizedTensor):
            weight = linear.weight._replace(
                codes=linear.weight.codes[rows],
                block_scale=_indexed(linear.weight.block_scale, rows),
            )
        else:
            weight = linear.weight[rows]
        bias = None if linear.bias is None else linear.bias[rows]
        return replace(linear, weight=weight, bias=bias)

    def _columns(self, linear: LinearWeight, columns: range, module: str) -> LinearWeight:
        weight: torch.Tensor | QuantizedTensor
        first, end = columns.start // BLOCK, columns.stop // BLOCK
        if isinstance(linear.weight, QuantizedTensor):
            blocks = linear.weight.block_scale.shape[1]
            weight = linear.weight._replace(
                codes=linear.weight.codes[:, columns.start // 2 : columns.stop // 2],
                block_scale=linear.weight.block_scale[:, first:end],
            )
        else:
            blocks = linear.weight.shape[1] // BLOCK
            weight = linear.weight[:, columns.start : columns.stop]
        bounds = linear.segment_bounds or segment_bounds(blocks)
        per_rank = SEGMENTS // self.shard.size
        own = bounds[self.shard.rank * per_rank : (self.shard.rank + 1) * per_rank + 1]
        if len(bounds) != SEGMENTS + 1 or (own[0], own[-1]) != (first, end):
            raise NetworkError(
                f"{module}: the segments of K end at blocks {list(bounds)}; a rank's part from "
                f"block {first} to {end} does not begin and end with one"
            )
        return replace(linear, weight=weight, segment_bounds=tuple(b - first for b in own))


def _indexed(scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of an e4m3 tensor, which torch does not index on every device."""
    return scales.view(torch.uint8)[rows].view(scales.dtype)


# Networks

# Ops that run on a rank's own heads or features as they do on all of them.
_ON_PARTS = frozenset(
    {"kv_append", "linear", "reshape", "rms_norm", "rotary_embedding", "scale", "silu_mul"}
    | {"split", "tree_attention"}
)


class _NetworkShard:
    """Copies a network op by op, with the tensors of one rank."""

    def __init__(self, network: Network, shard: Shard) -> None:
        self._whole = network
        self._shard = shard
        self._divided: set[str] = set()
        self.network = replace(network, tensors={}, ops=[], weights={}, states={})
        for name in network.inputs:
            self.network.tensors[name] = network.tensors[name]
        for op in network.ops:
            self._add(op)

    def _add(self, op: Op) -> None:
        divided = [
            name in self._divided
            for name in op.inputs
            if self._whole.tensors[name].dtype != "int32"
        ]
        use = _use(self._whole, op)
        if any(divided) and not (all(divided) and op.kind in _ON_PARTS):
            raise NetworkError(f"{op.name}: an operand of {op.kind} is divided among ranks")
        if op.kind == "linear" and any(divided) != (use == "row"):
            raise NetworkError(
                f"{op.name}: its input is {'divided' if any(divided) else 'whole'}, but it is "
                f"{'row' if use == 'row' else 'not row'}-parallel"
            )
        weights = tuple(self._weight(name, use) for name in op.weights)
        attrs = {key: value for key, value in op.attrs.items() if key != "parallel"}
        if use == "vocabulary":
            self._gathered(op, weights, attrs)
            return
        if use == "row":
            attrs["row_parallel"] = True
        on_part = use == "column" or (any(divided) and use != "row")
        if on_part and op.kind == "rms_norm" and len(self._shape(op.inputs[0])) != 3:
            raise NetworkError(f"{op.name}: a norm over features that are divided among ranks")
        if on_part and op.kind == "split":
            attrs["sizes"] = [self._shard.part(size, op.name) for size in attrs["sizes"]]
        self._state(op, any(divided))
        for name in op.outputs:
            tensor = self._whole.tensors[name]
            self.network.tensors[name] = self._part(tensor) if on_part else tensor
            if on_part:
                self._divided.add(name)
        self.network.ops.append(replace(op, weights=weights, attrs=attrs))

    def _gathered(self, op: Op, weights: tuple[str, ...], attrs: dict[str, Any]) -> None:
        """A linear of this rank's columns, and all ranks' columns side by side."""
        (name,) = op.outputs
        whole = self._whole.tensors[name]
        bounds = vocabulary_bounds(int(whole.shape[1]), self._shard.size)
        own = bounds[self._shard.rank + 1] - bounds[self._shard.rank]
        part = Tensor(f"{name}.part", (whole.shape[0], own), whole.dtype)
        if own == 0:
            raise NetworkError(
                f"{op.name}: {whole.shape[1]} columns are too few for {self._shard.size} ranks"
            )
        self.network.tensors |= {part.name: part, name: whole}
        self.network.ops += [
            replace(op, outputs=(part.name,), weights=weights, attrs=attrs),
            Op("all_gather", f"{op.name}.all", (part.name,), (name,), attrs={"columns": bounds}),
        ]

    def _weight(self, name: str, use: _Use) -> str:
        local = _local_name(name, use)
        self.network.weights[local] = self._whole.weights[name]
        return local

    def _state(self, op: Op, divided: bool) -> None:
        if op.state is None:
            return
        state = self._whole.states[op.state]
        if divided:
            heads = self._shard.part(state.heads, f"{state.name}: KV heads")
            state = replace(state, heads=heads)
        self.network.states[op.state] = state

    def _part(self, tensor: Tensor) -> Tensor:
        rows, features, *rest = tensor.shape
        what = f"{tensor.name}: {'heads' if rest else 'features'}"
        return replace(tensor, shape=(rows, self._shard.part(int(features), what), *rest))

    def _shape(self, name: str) -> tuple[Dim, ...]:
        return self._whole.tensors[name].shape
