"""One ragged step over paged KV, for a lowered network with plugins and for the reference."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowered import Batch
from trtree.build.lowering.reference import StepContext, paged_kv
from trtree.build.lowering.tensorrt.lower import LoweredNetwork
from trtree.build.network.network import Network, State
from trtree.plugins.tree_attention.contract import E4M3_MAX, AttentionSegment
from trtree.plugins.tree_attention.plan import plan_attention, row_tables

# Rows of nobody's behind the step's, as rounded-up sizes bring them.
PADDING = 3
# What pages hold that no request has written: a read through a wrong page shows.
GARBAGE = 3e4


@dataclass
class PagedBatch(Batch):
    """``caches`` are [pages, page_size, kv_heads, D], of ``kv_states``; target_ctas cuts
    attention into items."""

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
        }
        for plan in lowered.plans:
            made = plan_attention(
                self.segments,
                self.num_rows + PADDING,
                kv_heads=plan.kv_heads,
                group=plan.group,
                block_m=plan.block_m,
                target_ctas=self.target_ctas,
                window=plan.window,
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
        return StepContext(caches, self.segments)


def make_paged_batch(
    lowered: LoweredNetwork,
    lengths: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    kv_states: Mapping[str, State],
    seed: int = 0,
) -> PagedBatch:
    """Random committed keys and values in shuffled pages, garbage everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        binding.name: ([int(dim) for dim in binding.dims], getattr(torch, binding.dtype))
        for binding in lowered.inputs
        if binding.name.endswith((".k", ".v"))
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
            slots = torch.arange(segment.prefix_length)
            where = segment.pages[slots // page_size], slots % page_size
            new = torch.randn(segment.prefix_length, *shape[2:], generator=generator)
            if fp8:
                state = kv_states[name.rpartition(".")[0]]
                new /= state.k_scale if name.endswith(".k") else state.v_scale
            caches[name][where] = new.to(dtype)
    return PagedBatch(lengths, token_ids, parents, caches, segments, kv_states)


def ragged_forced(
    lowered: LoweredNetwork,
    network: Network,
    batch: PagedBatch,
    values: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A reference run's tensors [rows, ...] in the layout and under the names of the lowered
    network; those of output rows have no padding."""
    forced = {}
    for name, value in values.items():
        if name in lowered.tensors:
            of_outputs = network.tensors[name].shape[0] == "outputs"
            rows = value if of_outputs else batch.padded_rows(value)
            forced[lowered.tensors[name]] = rows if value.ndim == 3 else rows[None]
    return forced
