"""One rank's part of the networks: heads, features and vocabulary divided among ranks.

Column-parallel linears give a rank its part of each module's out_features, so that
attention, recurrences and gated activations run on a rank's own heads and features.
Row-parallel ones read that part and give the sums of the rank's own segments of K, which
all ranks add in the order of K: the bits are those of one rank. Logits are gathered before
anything looks at them, so token ids are global. Everything else is whole on every rank. A
drafter is divided like the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from trtree.build.checkpoint import LinearWeight, StoredLinear
from trtree.build.checkpoint.matrix import Matrix, Room, cut_rows, take
from trtree.build.lowering.division import (
    ON_PARTS,
    ROUTED,
    SEGMENTS,
    Division,
    Heads,
    Shard,
    Use,
    divided_rows,
    segment_bounds,
    vocabulary_bounds,
)
from trtree.build.lowering.weights import View, WeightPlan, WeightReader
from trtree.build.network.network import (
    Network,
    NetworkError,
    Op,
    Owner,
    Tensor,
    Weight,
    tensor_name,
)
from trtree.plugins.nvfp4_linear.format import BLOCK, QuantizedTensor


@dataclass(frozen=True)
class _Part:
    """What a rank stores of a linear: ranges of its rows (fused out_features) or of its
    columns (in_features); None: all of them. Of stacked experts: of each of them."""

    rows: tuple[tuple[range, ...], ...] | None = None  # by module
    columns: range | None = None

    def indices(self) -> torch.Tensor:
        """int64 [rows]: of the rows of all modules."""
        ranges = chain(*(self.rows or ()))
        return torch.cat([torch.arange(r.start, r.stop) for r in ranges])


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
    divisions = {name: Division(network, shard) for name, network in networks.items()}
    local = {name: _NetworkShard(divisions[name]).network for name in networks}
    plan = WeightPlan({}, {})
    parts: dict[tuple[Owner, tuple[str, ...]], _Part] = {}
    uses: dict[str, set[Use]] = {}  # by stored weight, how its parts are used
    modules = {k: heads for known in divisions.values() for k, heads in known.modules.items()}
    for name, network in networks.items():
        for op in network.ops:
            for weight_name in op.weights:
                stored_name = weights.views[weight_name].stored
                uses.setdefault(stored_name, set()).add(divisions[name].uses[op.name])
    for weight in weights.stored.values():
        part = _part(weight, uses[weight.name], modules, shard)
        for expert in range(weight.experts):
            parts[weight.owner, weight.modules_of(expert)] = part
        parts[weight.owner, weight.modules] = part
        if len(weight.shape) == 1 and part.rows is not None:
            parts |= _vector_parts(weight, part.rows)
        plan.stored[weight.name] = _cut(weight, part)
    for name, network in networks.items():
        for op in network.ops:
            use = divisions[name].uses[op.name]
            for weight_name in op.weights:
                view = weights.views[weight_name]
                stored = plan.stored[view.stored]
                part = parts[stored.owner, stored.modules]
                plan.views[_local_name(weight_name, use)] = _view(
                    network.weights[weight_name], use, view, stored, part, shard
                )
    return RankNetworks(shard, local, plan, parts)


# Weights


def _local_name(weight: str, use: Use) -> str:
    return f"{weight}@{use}" if use else weight


def _part(
    weight: Weight,
    uses: set[Use],
    modules: Mapping[tuple[Owner, str], Heads],
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
        return _Part(rows=((range(*bounds[shard.rank : shard.rank + 2]),),))
    return _Part(rows=divided_rows(weight, modules, shard))


def _vector_parts(
    weight: Weight, rows: tuple[tuple[range, ...], ...]
) -> dict[tuple[Owner, tuple[str, ...]], _Part]:
    """Vectors are read tensor by tensor, each from its own first number on."""
    parts: dict[tuple[Owner, tuple[str, ...]], _Part] = {}
    for index, (module, ranges) in enumerate(zip(weight.modules, rows, strict=True)):
        start = sum(weight.sizes[:index])
        own = tuple(range(r.start - start, r.stop - start) for r in ranges)
        parts[weight.owner, (tensor_name(module),)] = _Part(rows=(own,))
    return parts


def _columns(weight: Weight, shard: Shard) -> range:
    k = weight.shape[-1]
    if k % BLOCK:
        raise NetworkError(
            f"{weight.name}: in_features {k} are no whole blocks of {BLOCK} to divide among "
            f"{shard.size} ranks"
        )
    return shard.features(k, f"{weight.name}: in_features")


def _cut(weight: Weight, part: _Part) -> Weight:
    if part.columns is not None:
        return replace(weight, shape=(*weight.shape[:-1], len(part.columns)))
    if part.rows is None:
        return weight
    sizes = tuple(sum(map(len, ranges)) for ranges in part.rows)
    if weight.experts:
        shape: tuple[int, ...] = (weight.experts, sum(sizes), weight.shape[2])
        return replace(weight, shape=shape, out_sizes=sizes * weight.experts)
    return replace(weight, shape=(sum(sizes), *weight.shape[1:]), out_sizes=sizes)


def _view(weight: Weight, use: Use, view: View, stored: Weight, part: _Part, shard: Shard) -> View:
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
        part = self.parts.get((self.owner, (tensor_name,)))
        return whole if part is None or part.rows is None else whole.reshape(-1)[part.indices()]

    def linear(self, modules: Sequence[str]) -> LinearWeight:
        linear = self.checkpoint.linear(modules)
        cut = self._cut(StoredLinear.of(linear), modules)
        weight: torch.Tensor | QuantizedTensor
        if isinstance(linear.weight, QuantizedTensor):
            weight = linear.weight._replace(
                codes=torch.cat(take(cut.codes, 0, cut.shape[0], Room())),
                block_scale=torch.cat(take(cut.block_scales, 0, cut.shape[0], Room())),
            )
        else:
            weight = torch.cat(take(cut.dense, 0, cut.shape[0], Room()))
        smoothing, part = linear.smoothing, self.parts[self.owner, tuple(modules)]
        if smoothing is not None and part.rows is not None:
            smoothing = smoothing.rows(part.indices())
        return replace(
            linear,
            weight=weight,
            bias=cut.bias,
            segment_bounds=cut.segment_bounds,
            smoothing=smoothing,
        )

    def stored_linear(self, modules: Sequence[str]) -> StoredLinear:
        return self._cut(self.checkpoint.stored_linear(modules), modules)

    def _cut(self, linear: StoredLinear, modules: Sequence[str]) -> StoredLinear:
        """The rank's part."""
        part = self.parts[self.owner, tuple(modules)]
        if part.columns is not None:
            return self._columns(linear, part.columns, modules[0])
        if part.rows is None:
            return _cut_columns(linear, None)
        ranges = list(chain(*part.rows))
        return replace(
            linear,
            codes=cut_rows(linear.codes, ranges),
            block_scales=cut_rows(linear.block_scales, ranges),
            dense=cut_rows(linear.dense, ranges),
            bias=None if linear.bias is None else linear.bias[part.indices()],
        )

    def _columns(self, linear: StoredLinear, columns: range, module: str) -> StoredLinear:
        first, end = columns.start // BLOCK, columns.stop // BLOCK
        bounds = linear.segment_bounds or segment_bounds(linear.shape[1] // BLOCK)
        per_rank = SEGMENTS // self.shard.size
        own = bounds[self.shard.rank * per_rank : (self.shard.rank + 1) * per_rank + 1]
        if len(bounds) != SEGMENTS + 1 or (own[0], own[-1]) != (first, end):
            raise NetworkError(
                f"{module}: the segments of K end at blocks {list(bounds)}; a rank's part from "
                f"block {first} to {end} does not begin and end with one"
            )
        cut = _cut_columns(linear, columns)
        return replace(cut, segment_bounds=tuple(bound - first for bound in own))


def _cut_columns(linear: StoredLinear, columns: range | None) -> StoredLinear:
    """Columns of in_features, or all of them; whole blocks of 16."""

    def cut(matrices: Sequence[Matrix], per: int) -> tuple[Matrix, ...]:
        """``per``: elements of K that a column stands for."""
        own = None if columns is None else range(columns.start // per, columns.stop // per)
        return tuple(matrix.cut(None, own) for matrix in matrices)

    return replace(
        linear,
        codes=cut(linear.codes, 2),
        block_scales=cut(linear.block_scales, BLOCK),
        dense=cut(linear.dense, 1),
    )


# Networks


_OF_ALL_RANKS = ("parallel", "key_heads", "parts")  # attributes that say how to divide


class _NetworkShard:
    """Copies a network op by op, with the tensors of one rank."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._whole = network = division.network
        self._shard = division.shard
        self._divided: set[str] = set()
        self.network = replace(network, tensors={}, ops=[], weights={}, states={})
        for name in network.inputs:
            self.network.tensors[name] = network.tensors[name]
        for op in network.ops:
            self._add(op)

    def _add(self, op: Op) -> None:
        # Every rank knows of every row which experts it goes to.
        operands = op.inputs[:1] if op.kind in ROUTED else op.inputs
        divided = [
            name in self._divided for name in operands if self._whole.tensors[name].dtype != "int32"
        ]
        use = self._division.uses[op.name]
        if any(divided) and not (all(divided) and op.kind in ON_PARTS):
            raise NetworkError(f"{op.name}: an operand of {op.kind} is divided among ranks")
        by_columns = op.kind in ("linear", "experts_down", "experts_linear")
        if by_columns and any(divided) != (use == "row"):
            raise NetworkError(
                f"{op.name}: its input is {'divided' if any(divided) else 'whole'}, but it is "
                f"{'row' if use == 'row' else 'not row'}-parallel"
            )
        weights = tuple(self._weight(name, use) for name in op.weights)
        attrs = {key: value for key, value in op.attrs.items() if key not in _OF_ALL_RANKS}
        if use == "vocabulary":
            self._gathered(op, weights, attrs)
            return
        if use == "row":
            attrs["row_parallel"] = True
        on_part = use == "column" or (any(divided) and use != "row")
        if on_part and op.kind == "rms_norm" and len(self._shape(op.inputs[0])) != 3:
            raise NetworkError(f"{op.name}: a norm over features that are divided among ranks")
        if on_part and op.kind == "split" and len(self._shape(op.inputs[0])) == 2:
            attrs["sizes"] = [self._division.extent(name) for name in op.outputs]
        self._state(op, any(divided))
        for name in op.outputs:
            tensor = self._whole.tensors[name]
            self.network.tensors[name] = self._division.part(op, tensor) if on_part else tensor
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
                f"{op.name}: {whole.shape[1]} columns are too few for {self._shard.size} ranks; "
                "lower tp"
            )
        self.network.tensors |= {part.name: part, name: whole}
        self.network.ops += [
            replace(op, outputs=(part.name,), weights=weights, attrs=attrs),
            Op("all_gather", f"{op.name}.all", (part.name,), (name,), attrs={"columns": bounds}),
        ]

    def _weight(self, name: str, use: Use) -> str:
        local = _local_name(name, use)
        self.network.weights[local] = self._whole.weights[name]
        return local

    def _state(self, op: Op, divided: bool) -> None:
        if op.state is None:
            return
        state = self._whole.states[op.state]
        self.network.states[op.state] = self._division.shard.state(state) if divided else state

    def _shape(self, name: str) -> tuple[int | str, ...]:
        return self._whole.tensors[name].shape
