"""One ragged step over paged KV, for a lowered network with plugins and for the reference."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowered import Batch
from trtree.build.lowering.reference import StepContext, paged_kv
from trtree.build.lowering.tensorrt.lower import LoweredNetwork
from trtree.build.network.network import Network, State
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.branch_tables import BranchTables
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.sparse_indexer.plan import row_lengths
from trtree.plugins.tree_attention.contract import E4M3_MAX, AttentionSegment
from trtree.plugins.tree_attention.plan import plan_attention, row_tables

# Rows of nobody's behind the step's, as rounded-up sizes bring them.
PADDING = 3
# What pages hold that no request has written: a read through a wrong page shows.
GARBAGE = 3e4


@dataclass
class PagedBatch(Batch):
    """``caches`` are [pages, page_size, kv_heads, D], of ``kv_states``, or [pages, page_size, D]
    of latents; target_ctas cuts attention into items."""

    segments: Sequence[AttentionSegment]
    kv_states: Mapping[str, State]
    target_ctas: int = 64

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    def padded_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [rows + PADDING, ...]."""
        return torch.cat([rows, rows.new_zeros(PADDING, *rows.shape[1:])])

    def ragged_inputs(
        self, lowered: LoweredNetwork, **more: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What the lowered network takes; every row is an output row. ``more``: by row."""
        given = {**self.reference_inputs(), **more}
        tables = row_tables(self.segments, self.num_rows + PADDING)
        bindings = {binding.name: binding for binding in lowered.inputs}
        inputs: dict[str, torch.Tensor] = {n: cache.clone() for n, cache in self.caches.items()}
        for name in ("token_ids", "positions", "captured"):
            if name in given:
                inputs[name] = self.padded_rows(given[name])[None]
        for name in ("packed_mask", "causal_mask"):
            if name in given and name in bindings:
                words = int(bindings[name].dims[1]) - given[name].shape[1]
                inputs[name] = self.padded_rows(torch.nn.functional.pad(given[name], (0, words)))
        table = torch.zeros([int(dim) for dim in bindings["page_table"].dims], dtype=torch.int32)
        requests, width = tables.page_table.shape
        table[:requests, :width] = tables.page_table
        inputs |= {
            "slots": tables.slots,
            "requests": tables.requests,
            "page_table": table,
            "output_rows": given["output_rows"][None],
            "lengths": row_lengths(self.segments, self.num_rows + PADDING),
            **self.states,
        }
        if self.states:
            (kernel,) = {1 + s.shape[1] for s in self.states.values() if s.ndim == 3}
            branches = BranchTables.of(self.branches(), kernel)
            idle = int(bindings["branch_requests"].dims[0]) - requests
            inputs["branch_requests"] = torch.nn.functional.pad(branches.requests, (0, 0, 0, idle))
            inputs["conv_inputs"] = self.padded_rows(branches.conv_inputs)
        for plan in lowered.plans:
            made = plan_attention(
                self.segments,
                self.num_rows + PADDING,
                kv_heads=plan.kv_heads,
                group=plan.group,
                block_m=plan.block_m,
                target_ctas=self.target_ctas,
                window=plan.window,
                top_k=plan.top_k,
                max_items=plan.max_items,
            )
            # And one idle item.
            inputs[f"work{plan.suffix}"] = made.padded(made.num_items + 1).work
            inputs[f"row_splits{plan.suffix}"] = made.row_splits
        return {name: inputs[name] for name in bindings}

    def context(self) -> StepContext:
        names = {name.removesuffix(".k") for name in self.caches if name.endswith(".k")}
        caches = {}
        for name in names:
            k, v = self.caches[f"{name}.k"], self.caches[f"{name}.v"]
            caches[name] = paged_kv(self.kv_states[name], *k.shape[:2])
            caches[name].k.copy_(k)
            caches[name].v.copy_(v)
        latents = {
            name.removesuffix(".latent"): LatentCache(cache.clone())
            for name, cache in self.caches.items()
            if name.endswith(".latent")
        }
        return StepContext(caches, self.segments, self.states, self.branches(), latents=latents)

    def branches(self) -> list[StateSegment]:
        """Requests in slots from the last on."""
        slots = max((len(state) for state in self.states.values()), default=0)
        return [
            StateSegment(s.first_row, s.num_rows, slots - 1 - index, s.prefix_length == 0, parents)
            for index, (s, parents) in enumerate(zip(self.segments, self.parents, strict=True))
        ]


def make_paged_batch(
    lowered: LoweredNetwork,
    lengths: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    kv_states: Mapping[str, State],
    seed: int = 0,
) -> PagedBatch:
    """Random committed keys, values and latents in shuffled pages, garbage everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        binding.name: ([int(dim) for dim in binding.dims], getattr(torch, binding.dtype))
        for binding in lowered.inputs
        if binding.name.endswith((".k", ".v", ".latent"))
    }
    (num_pages, page_size, *_), _ = next(iter(shapes.values()))
    free = list(range(num_pages))
    random.Random(seed).shuffle(free)
    segments, first = [], 0
    for length, ids in zip(lengths, token_ids, strict=True):
        count = -(-(length + len(ids)) // page_size)
        pages = torch.tensor([free.pop() for _ in range(count)])
        segments.append(AttentionSegment(first, len(ids), length, pages))
        first += len(ids)
    caches = {}
    for name, (shape, dtype) in shapes.items():
        fp8 = dtype == torch.float8_e4m3fn
        caches[name] = torch.full(shape, E4M3_MAX if fp8 else GARBAGE).to(dtype)
        for segment in segments:
            where = LatentCache(caches[name]).locate(
                segment.pages, torch.arange(segment.prefix_length)
            )
            new = torch.randn(segment.prefix_length, *shape[2:], generator=generator)
            if fp8:
                state = kv_states[name.rpartition(".")[0]]
                new /= state.k_scale if name.endswith(".k") else state.v_scale
            caches[name][where] = new.to(dtype)
    states = {}
    for binding in lowered.inputs:
        if binding.name in lowered.branches:
            state = torch.randn([int(dim) for dim in binding.dims], generator=generator)
            states[binding.name] = state.to(getattr(torch, binding.dtype))
    return PagedBatch(lengths, token_ids, parents, caches, segments, kv_states, states=states)


def ragged_forced(
    lowered: LoweredNetwork,
    network: Network,
    batch: PagedBatch,
    values: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A reference run's tensors [rows, ...] in the layout and under the names of the lowered
    network; those of output rows have no padding."""
    forced, ragged = {}, ragged_names(network)
    for name, value in values.items():
        if name in lowered.tensors:
            of_outputs = network.tensors[name].shape[0] == "outputs"
            rows = value if of_outputs else batch.padded_rows(value)
            forced[lowered.tensors[name]] = rows if name in ragged else rows[None]
    return forced


def ragged_names(network: Network) -> set[str]:
    """What the lowered network has as [rows, ...]: heads and selections; the rest is
    [1, rows, ...]."""
    chosen = {op.outputs[0] for op in network.ops if op.kind == "index_select"}
    return chosen | {name for name, tensor in network.tensors.items() if len(tensor.shape) == 3}
