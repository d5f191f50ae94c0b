"""Networks lowered to TensorRT for tests, evaluated beside the reference on equal inputs."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from network_evaluator import NetworkEvaluator
from plugin_network import PluginBuilder, plugins
from trtree.build import builder
from trtree.build.builder import EngineDescription
from trtree.build.lowering.division import WHOLE, Shard
from trtree.build.lowering.reference import ReferenceNetwork, StepContext
from trtree.build.lowering.reference_weights import SUFFIX, load_networks, write_files
from trtree.build.lowering.shard import RankNetworks
from trtree.build.lowering.tensorrt.backend import most_rows
from trtree.build.lowering.tensorrt.compile import BuildMessages
from trtree.build.lowering.tensorrt.library import load_library
from trtree.build.lowering.tensorrt.lower import LoweredNetwork, lower
from trtree.build.lowering.tensorrt.paged import paged_lowering
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes
from trtree.build.lowering.tensorrt.weights import Encoding, stage
from trtree.build.network.network import Network, Op
from trtree.build.options import BuildOptions
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.causal_conv.contract import input_table
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.mla_attention.reference import chosen
from trtree.plugins.moe.reference import slots
from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv


def lower_networks(
    description: EngineDescription, *, fp4: bool = True, rank: int = 0, ranks: int = 1
) -> dict[str, LoweredNetwork]:
    """The description's networks for one rank, not compiled; plugin layers as recorded."""
    trt = load_library("tensorrt-rtx").module
    encoding = Encoding(fp4, Shard(rank, ranks))
    lowered = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, network in description.networks.items():
            logger = BuildMessages().logger(trt)
            made, sizes, paged = trt.Builder(logger), description.engine_sizes, None
            _KEPT.append((logger, made))
            weights = stage(
                Path(directory) / name, network, encoding, description.source.checkpoint
            )
            if isinstance(sizes, PagedSizes):
                made = PluginBuilder(made)
                paged = paged_lowering(sizes, plugins(), network, encoding.shard)
            rows = most_rows(sizes.profiles(network, encoding.shard))
            length = sizes.cache_length
            lowered[name] = lower(
                trt, made, network, encoding, weights, length, paged, max_rows=rows
            )
    return lowered


# Builders have to outlive what they built.
_KEPT: list[Any] = []


def evaluators(lowered: Mapping[str, LoweredNetwork]) -> dict[str, NetworkEvaluator]:
    trt = load_library("tensorrt-rtx").module
    return {
        name: NetworkEvaluator(trt, network.definition, network.constants)
        for name, network in lowered.items()
    }


def references(description: EngineDescription, directory: Path) -> dict[str, ReferenceNetwork]:
    """The same networks in the reference lowering."""
    owners = description.owners()
    checkpoints = {owner: description.source.checkpoint(owner) for owner in owners}

    class Out:
        path = directory

    whole = RankNetworks(WHOLE, description.networks, description.weights)
    write_files(Out(), [whole], checkpoints, lambda _: None)
    files = {owner: directory / f"{owner}.rank0.{SUFFIX}" for owner in owners}
    return load_networks(description.networks, files)


def describe(options: BuildOptions, **changes: Any) -> EngineDescription:
    """For the tensorrt-rtx backend."""
    return builder.describe(options.with_changes({"backend": "tensorrt-rtx", **changes}))


@dataclass
class Batch:
    """Requests of one step. lengths: committed tokens. parents: per request, per row.

    Both sides start from the same committed keys and values: ``caches`` [B, heads, S, D]
    by binding name, random where committed and zero behind. ``states`` that branch, [B, ...]
    by name, likewise: zero where nothing is committed.
    """

    lengths: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    caches: Mapping[str, torch.Tensor]
    states: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def width(self) -> int:
        return max(map(len, self.token_ids))

    def masks(self) -> torch.Tensor:
        """bool [B, W, W]: ancestors and oneself."""
        mask = torch.eye(self.width, dtype=torch.bool).repeat(len(self.lengths), 1, 1)
        for request, parents in enumerate(self.parents):
            for row, parent in enumerate(parents):
                if parent >= 0:
                    mask[request, row] |= mask[request, parent]
        return mask

    def positions(self) -> torch.Tensor:
        """int32 [B, W]: committed length plus depth; padding repeats the first."""
        depth = self.masks().sum(-1) - 1
        lengths = torch.tensor(self.lengths)[:, None]
        return torch.where(self.real(), lengths + depth, lengths).int()

    def real(self) -> torch.Tensor:
        """bool [B, W]: rows that are no padding."""
        counts = torch.tensor([len(ids) for ids in self.token_ids])
        return torch.arange(self.width)[None, :] < counts[:, None]

    def ids(self) -> torch.Tensor:
        padded = [[*ids, *[0] * (self.width - len(ids))] for ids in self.token_ids]
        return torch.tensor(padded, dtype=torch.int32)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, W, ...] -> the ragged rows [rows, ...]."""
        return x[self.real()]

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [B, W, ...], zero where padded."""
        out = torch.zeros(*self.real().shape, *rows.shape[1:], dtype=rows.dtype)
        out[self.real()] = rows
        return out

    def network_inputs(self, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a lowered network takes; every row is an output row."""
        rows = torch.arange(self.width, dtype=torch.int32).repeat(len(self.lengths), 1)
        return {
            "token_ids": self.ids(),
            "positions": self.positions(),
            "committed_lengths": torch.tensor(self.lengths, dtype=torch.int32),
            "tree_mask": self.masks(),
            "output_rows": rows,
            **{name: cache.clone() for name, cache in self.caches.items()},
            **self.states,
            **({"conv_inputs": self.conv_inputs()} if self.states else {}),
            **more,
        }

    def conv_inputs(self) -> torch.Tensor:
        """int32 [B, W, kernel]; padding continues the committed window."""
        (kernel,) = {1 + s.shape[1] for s in self.states.values() if s.ndim == 3}
        rows = [[*p, *[-1] * (self.width - len(p))] for p in self.parents]
        return torch.stack([torch.from_numpy(input_table(parents, kernel)) for parents in rows])

    def reference_inputs(self) -> dict[str, torch.Tensor]:
        slots = torch.tensor(self.lengths)[:, None] + torch.arange(self.width)
        return {
            "token_ids": self.rows(self.ids()),
            "positions": self.rows(self.positions()),
            "slots": self.rows(slots).int(),
            "parents": torch.tensor([p for parents in self.parents for p in parents]).int(),
            "packed_mask": _pack(self.rows(self.masks())),
            "output_rows": torch.arange(int(self.real().sum()), dtype=torch.int32),
        }

    def context(self) -> StepContext:
        """One page of the whole cache's length per request."""
        names = {name.removesuffix(".k") for name in self.caches if name.endswith(".k")}
        caches = {
            name: PagedKv(*(self.caches[f"{name}.{w}"].transpose(1, 2).contiguous() for w in "kv"))
            for name in names
        }
        latents = {
            name.removesuffix(".latent"): LatentCache(cache[:, 0].clone())
            for name, cache in self.caches.items()
            if name.endswith(".latent")
        }
        segments, branches, first = [], [], 0
        for index, (length, parents) in enumerate(zip(self.lengths, self.parents, strict=True)):
            rows = len(parents)
            segments.append(AttentionSegment(first, rows, length, torch.tensor([index])))
            branches.append(StateSegment(first, rows, index, length == 0, parents))
            first += rows
        return StepContext(caches, segments, self.states, branches, latents=latents)


def make_batch(
    lowered: LoweredNetwork,
    lengths: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    seed: int = 0,
) -> Batch:
    """A batch over random committed caches of the lowered network's shapes."""
    generator = torch.Generator().manual_seed(seed)
    caches = {}
    for binding in lowered.inputs:
        if binding.name.endswith((".k", ".v", ".latent")):
            shape = [len(lengths), *(int(dim) for dim in binding.dims[1:])]
            cache = torch.randn(shape, generator=generator)
            for entry, length in zip(cache, lengths, strict=True):
                entry[:, length:] = 0
            caches[binding.name] = cache.to(getattr(torch, binding.dtype))
    states = {}
    for binding in lowered.inputs:
        if binding.name in lowered.branches:
            shape = [len(lengths), *(int(dim) for dim in binding.dims[1:])]
            state = torch.randn(shape, generator=generator)
            state[torch.tensor(lengths) == 0] = 0
            states[binding.name] = state.to(getattr(torch, binding.dtype))
    return Batch(lengths, token_ids, parents, caches, states=states)


def forced_values(
    lowered: LoweredNetwork, network: Network, batch: Batch, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A reference run's tensors [rows, ...] in the layout and under the names of the
    lowered network."""
    routed = routed_tensors(network)
    selections = {op.outputs[0] for op in network.ops if op.kind == "index_select"}
    forced = {}
    for name, value in values.items():
        if name in selections:
            mask = batch.padded(by_key(batch, value))
            mask[..., 0] |= ~batch.real()  # padding has to see something
            forced[lowered.tensors[name]] = mask
        elif name in routed:
            forced[lowered.tensors[name]] = by_expert(batch, value, values[routed[name]])
        elif name in lowered.tensors:
            padded = batch.padded(value)
            forced[lowered.tensors[name]] = padded.transpose(1, 2) if value.ndim == 3 else padded
    return forced


def routed_tensors(network: Network) -> dict[str, str]:
    """Tensors [rows, slots, F], and the weights [rows, experts] that fill their slots."""
    routed: dict[str, str] = {}
    for op in network.ops:
        if op.kind in ("experts_up", "experts_scale", "experts_linear"):
            routed[op.outputs[0]] = op.inputs[1]
        elif op.kind == "scale" and op.inputs[0] in routed:
            routed[op.outputs[0]] = routed[op.inputs[0]]
    return routed


def by_expert(batch: Batch, value: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[rows, slots, F] -> [experts, B * W, F], zero where a row did not choose the expert."""
    rows = batch.real().flatten().nonzero().flatten()
    dense = torch.zeros(weights.shape[1], batch.real().numel(), value.shape[2], dtype=value.dtype)
    row, expert = weights.nonzero(as_tuple=True)
    dense[expert, rows[row]] = value[row, slots(weights)[row, expert]]
    return dense


def by_key(batch: Batch, selection: torch.Tensor) -> torch.Tensor:
    """A selection int32 [rows, top_k] as the lowered network has it: bool [rows, S]."""
    (length,) = {cache.shape[2] for cache in batch.caches.values()}
    return chosen(selection, length)


def by_slot(
    batch: Batch, dense: torch.Tensor, weights: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """The inverse of ``by_expert``; slots behind a row's last are zero."""
    rows = batch.real().flatten().nonzero().flatten()
    value = torch.zeros(len(weights), num_slots, dense.shape[2], dtype=dense.dtype)
    row, expert = weights.nonzero(as_tuple=True)
    value[row, slots(weights)[row, expert]] = dense[expert, rows[row]]
    return value


def ragged(batch: Batch, value: torch.Tensor) -> torch.Tensor:
    """[B, W, ...] or [B, heads, W, D] -> the rows [rows, ...]."""
    return batch.rows(value.transpose(1, 2) if value.ndim == 4 else value)


def recorded(
    network: ReferenceNetwork, inputs: Mapping[str, torch.Tensor], context: StepContext
) -> dict[str, torch.Tensor]:
    """Every tensor of a reference run by its name in the graph."""
    seen: dict[str, torch.Tensor] = dict(inputs)

    def observe(op: Op, outputs: list[torch.Tensor]) -> None:
        seen.update(zip(op.outputs, outputs, strict=True))

    network.run(inputs, context, observe)
    return seen


def _pack(mask: torch.Tensor) -> torch.Tensor:
    """bool [rows, W] -> int32 [rows, ceil(W / 32)], LSB first."""
    words = -(-mask.shape[1] // 32)
    bits = torch.zeros(len(mask), words * 32, dtype=torch.int64)
    bits[:, : mask.shape[1]] = mask.long()
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    packed = (bits.reshape(len(mask), words, 32) * weights).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()
