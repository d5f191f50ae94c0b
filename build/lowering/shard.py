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

    def kv_heads(self, heads: int, what: str) -> range:
        """This rank's KV heads; ranks that outnumber them share one among several.

        Raises:
            NetworkError: neither number is a multiple of the other.
        """
        if self.size % heads == 0:
            own = self.rank * heads // self.size
            return range(own, own + 1)
        part = self.part(heads, what)
        return range(self.rank * part, (self.rank + 1) * part)

    def of(self, tensor: torch.Tensor, axis: int, what: str) -> torch.Tensor:
        """This rank's part of ``axis``."""
        length = self.part(tensor.shape[axis], what)
        return tensor.narrow(axis, self.rank * length, length)


WHOLE = Shard()  # one rank has it all


@dataclass(frozen=True)
class _Part:
    """What a rank stores of a linear: ranges of its rows (fused out_features) or of its
    columns (in_features); None: all of them. Of stacked experts: of each of them."""

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
    facts = {name: _Facts(network) for name, network in networks.items()}
    local = {name: _NetworkShard(facts[name], shard).network for name in networks}
    plan = WeightPlan({}, {})
    parts: dict[tuple[Owner, tuple[str, ...]], _Part] = {}
    uses: dict[str, set[_Use]] = {}  # by stored weight, how its parts are used
    kv_heads = {key: heads for known in facts.values() for key, heads in known.kv_modules.items()}
    for name, network in networks.items():
        for op in network.ops:
            for weight_name in op.weights:
                stored_name = weights.views[weight_name].stored
                uses.setdefault(stored_name, set()).add(facts[name].uses[op.name])
    for weight in weights.stored.values():
        part = _part(weight, uses[weight.name], kv_heads, shard)
        for expert in range(weight.experts):
            parts[weight.owner, weight.modules_of(expert)] = part
        parts[weight.owner, weight.modules] = part
        plan.stored[weight.name] = _cut(weight, part)
    for name, network in networks.items():
        for op in network.ops:
            use = facts[name].uses[op.name]
            for weight_name in op.weights:
                view = weights.views[weight_name]
                stored = plan.stored[view.stored]
                part = parts[stored.owner, stored.modules]
                plan.views[_local_name(weight_name, use)] = _view(
                    network.weights[weight_name], use, view, stored, part, shard
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


class _Facts:
    """What a network says about how its parts are divided.

    uses: by op, how its weights are used. kv_heads: by tensor, from a k or v projection
    to the cache, the KV heads of all ranks; kv_modules: by owner and module likewise.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._producers = {name: op for op in network.ops for name in op.outputs}
        readers: dict[str, set[str]] = {}
        for op in network.ops:
            for name in op.inputs:
                readers.setdefault(name, set()).add(op.kind)
        self.uses: dict[str, _Use] = {}
        for op in network.ops:
            parallel = op.attrs.get("parallel")
            read_by = readers.get(op.outputs[0], set()) if op.outputs else set()
            whole = parallel == "column" and not read_by <= _ON_PARTS
            self.uses[op.name] = "vocabulary" if whole else parallel
        self.kv_heads: dict[str, int] = {}
        self.kv_modules: dict[tuple[Owner, str], int] = {}
        for op in network.ops:
            if op.kind == "kv_append" and op.state:
                for name in op.inputs[:2]:
                    self._follow(name, network.states[op.state].heads)

    def _follow(self, name: str, heads: int) -> None:
        """From the cache back to the projection."""
        module = 0
        while (op := self._producers.get(name)) is not None:
            self.kv_heads[name] = heads
            if op.kind == "linear":
                weight = self.network.weights[op.weights[0]]
                self.kv_modules[weight.owner, weight.modules[module]] = heads
                return
            if op.kind == "split":
                module = op.outputs.index(name)
                (name,) = op.inputs
                linear = self._producers[name]
                if linear.kind != "linear":
                    return
                weight = self.network.weights[linear.weights[0]]
                self.kv_modules[weight.owner, weight.modules[module]] = heads
                return
            name = op.inputs[0]


def _local_name(weight: str, use: _Use) -> str:
    return f"{weight}@{use}" if use else weight


def _part(
    weight: Weight,
    uses: set[_Use],
    kv_heads: Mapping[tuple[Owner, str], int],
    shard: Shard,
) -> _Part:
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
    sizes = weight.out_sizes[: len(weight.out_sizes) // (weight.experts or 1)]
    ranges = []
    for index, (module, size) in enumerate(zip(weight.modules, sizes, strict=False)):
        start = sum(sizes[:index])
        heads = kv_heads.get((weight.owner, module))
        if heads is not None:
            own, head_dim = shard.kv_heads(heads, f"{module}: KV heads"), size // heads
            ranges.append(range(start + own.start * head_dim, start + own.stop * head_dim))
            continue
        part = shard.part(size, f"{module}: out_features")
        ranges.append(range(start + shard.rank * part, start + (shard.rank + 1) * part))
    return _Part(rows=tuple(ranges))


def _columns(weight: Weight, shard: Shard) -> range:
    k = weight.shape[-1]
    if k % (BLOCK * shard.size):
        raise NetworkError(
            f"{weight.name}: in_features {k} are {k / BLOCK:g} blocks of {BLOCK}, which do not "
            f"divide among {shard.size} ranks"
        )
    part = k // shard.size
    return range(shard.rank * part, (shard.rank + 1) * part)


def _cut(weight: Weight, part: _Part) -> Weight:
    if part.columns is not None:
        return replace(weight, shape=(*weight.shape[:-1], len(part.columns)))
    if part.rows is None:
        return weight
    sizes = tuple(map(len, part.rows))
    if weight.experts:
        shape: tuple[int, ...] = (weight.experts, sum(sizes), weight.shape[2])
        return replace(weight, shape=shape, out_sizes=sizes * weight.experts)
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
    {"concat", "experts_down", "head_linear", "kv_append", "latent_attention", "linear"}
    | {"reshape", "rms_norm", "rotary_embedding", "scale", "sigmoid_mul", "silu_mul", "split"}
    | {"tree_attention"}
)


class _NetworkShard:
    """Copies a network op by op, with the tensors of one rank."""

    def __init__(self, facts: _Facts, shard: Shard) -> None:
        self._facts = facts
        self._whole = network = facts.network
        self._shard = shard
        self._divided: set[str] = set()
        # Parts of features; parts of every head leave the heads as they are.
        self._splits = {
            op.inputs[0]: op.outputs
            for op in network.ops
            if op.kind == "split" and len(network.tensors[op.inputs[0]].shape) == 2
        }
        self.network = replace(network, tensors={}, ops=[], weights={}, states={})
        for name in network.inputs:
            self.network.tensors[name] = network.tensors[name]
        for op in network.ops:
            self._add(op)

    def _add(self, op: Op) -> None:
        # Every rank knows of every row which experts it goes to.
        operands = op.inputs[:1] if op.kind == "experts_down" else op.inputs
        divided = [
            name in self._divided for name in operands if self._whole.tensors[name].dtype != "int32"
        ]
        use = self._facts.uses[op.name]
        if any(divided) and not (all(divided) and op.kind in _ON_PARTS):
            raise NetworkError(f"{op.name}: an operand of {op.kind} is divided among ranks")
        if op.kind in ("linear", "experts_down") and any(divided) != (use == "row"):
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
        if on_part and op.kind == "split" and op.inputs[0] in self._splits:
            attrs["sizes"] = [self._features(name) for name in op.outputs]
        self._state(op, any(divided))
        for name in op.outputs:
            tensor = self._whole.tensors[name]
            self.network.tensors[name] = self._part(op, tensor) if on_part else tensor
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
        if divided and state.kind != "latent":  # which all heads share
            own = self._shard.kv_heads(state.heads, f"{state.name}: KV heads")
            state = replace(state, heads=len(own))
        self.network.states[op.state] = state

    def _part(self, op: Op, tensor: Tensor) -> Tensor:
        """The tensor with this rank's features, or heads, of it."""
        if op.kind == "experts_up":  # [rows, slots, intermediate]
            *axes, features = tensor.shape
            part = self._shard.part(int(features), f"{tensor.name}: intermediate")
            return replace(tensor, shape=(*axes, part))
        rows, _, *rest = tensor.shape
        return replace(tensor, shape=(rows, self._features(tensor.name), *rest))

    def _features(self, name: str) -> int:
        """Of a tensor [rows, features], or the heads of one [rows, heads, head_dim]."""
        _, whole, *rest = self._shape(name)
        features = int(whole)
        if name in self._facts.kv_heads:
            heads = self._facts.kv_heads[name]
            return features // heads * len(self._shard.kv_heads(heads, f"{name}: KV heads"))
        if name in self._splits:
            return sum(map(self._features, self._splits[name]))
        return self._shard.part(features, f"{name}: {'heads' if rest else 'features'}")

    def _shape(self, name: str) -> tuple[Dim, ...]:
        return self._whole.tensors[name].shape
