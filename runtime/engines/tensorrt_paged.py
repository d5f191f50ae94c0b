"""TensorRT engines with ``attention: plugin`` behind the executor's contract.

A step is one ragged run: its rows stand one after another, KV and latents lie in the
executor's pages, and each request's page table, packed masks and work items go along. Sizes are
rounded up, by rows that belong to nobody and work items with nothing to do, so that a few CUDA
graphs serve all steps.

NOT YET RUN with TensorRT, whose plugins have not met a GPU that they were compiled for. The
tests run every line here; what needs CUDA is given to it: ``executables`` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.plugins.branch_tables import BranchTables, path_table
from trtree.plugins.sparse_indexer.plan import row_lengths
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import RowTables, plan_attention, row_tables
from trtree.runtime.engines.manifest import capabilities_of, check_kv_cache
from trtree.runtime.engines.tensorrt import draft_result, refuse_nan, refuse_split_logits
from trtree.runtime.engines.tensorrt_buffers import (
    BoundEngine,
    EngineSpec,
    Executable,
    allocate_caches,
)
from trtree.runtime.engines.tensorrt_commits import Commits
from trtree.runtime.engines.tensorrt_states import RaggedStates, Save

PROFILE = "step"


@dataclass(frozen=True)
class _Step:
    """What a commit needs of the step before it. results: the target's, such as captured states
    [1, rows, features]; they lie in its memory, which no other run touches before the commit.
    branches: where state branches."""

    batch: _core.RowBatch
    segments: Sequence[AttentionSegment]
    tables: RowTables
    results: Mapping[str, torch.Tensor]
    branches: BranchTables | None


class PagedTensorRTEngine(_core.Engine):
    """Runs an engine directory with ``backend: tensorrt`` and ``attention: plugin``.

    Args:
        executables: a loaded engine per file of this rank.
        device: where its memory is.
        commits: the kernels that move what was accepted.
        target_ctas: CTAs that attention is cut into: the GPU's SMs.
        rank: whose engines these are.
    """

    def __init__(
        self,
        engine: EngineDir,
        executables: Mapping[str, Executable],
        device: torch.device,
        commits: Commits,
        *,
        target_ctas: int,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self._capabilities = capabilities_of(engine)
        self._capabilities.sm = ",".join(map(str, engine.manifest["sm"]))
        self._device = device
        self._target_ctas = target_ctas
        self._ranks = engine.manifest["mapping"]["tp_size"]
        built = engine.manifest["tensorrt"]
        self._positions: int = built["cache_length"]
        self._engines: dict[str, BoundEngine] = {}
        self.caches: dict[str, torch.Tensor] = {}
        self._states: RaggedStates | None = None
        snapshots = self._capabilities.state_snapshots
        for file, entry in built["engines"].items():
            if entry["rank"] != rank:
                continue
            spec = EngineSpec.read(entry)
            if not self.caches.keys() >= spec.caches.keys():
                for names, memory in allocate_caches(spec, {}, device).items():
                    self.caches |= dict(zip(names, memory, strict=True))
            own = {name: self.caches[name] for name in spec.caches}
            if spec.branches:
                self._states = RaggedStates(spec, snapshots, device, commits)
                own |= self._states.committed
            self._engines[entry["network"]] = BoundEngine(spec, executables[file], own, device)
        target = self._engines["target"].spec.caches
        check_kv_cache(engine, (str(b.dtype).removeprefix("torch.") for b in target.values()))
        self._commit_pages = commits.pages([_movable(self.caches[name]) for name in target])
        speculative = engine.manifest["speculative_config"]
        self._mask_token = speculative["mask_token_id"] if speculative else 0
        self._last_step: _Step | None = None

    def capabilities(self) -> _core.Capabilities:
        return self._capabilities

    @torch.inference_mode()
    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        """One target pass over every segment; writes KV behind the committed prefixes."""
        _core.check_batch(batch, self._capabilities)
        segments = [_segment(s.sequence, s.first_row, s.num_rows) for s in batch.segments]
        masks = np.asarray(batch.packed_mask).reshape(-1, batch.mask_words)
        inputs: dict[str, NDArray[Any] | torch.Tensor] = {
            "token_ids": np.asarray(batch.token_ids),
            "positions": np.asarray(batch.positions),
            "packed_mask": masks,
            "output_rows": np.asarray(batch.output_rows),
        }
        branches = self._states.tables(batch) if self._states else None
        if branches:
            inputs |= {"conv_inputs": branches.conv_inputs, "branch_requests": branches.requests}
        results, tables = self._run("target", segments, inputs)
        if "nan_counts" in results:
            refuse_nan_scores(results["nan_counts"])
        argmax = results["argmax"][0, : len(batch.output_rows)].cpu().numpy()
        refuse_nan(argmax, self._capabilities.vocab_size)
        wanted = np.flatnonzero(batch.needs_logits)
        logits = np.zeros(0, dtype=np.float32)
        if len(wanted):
            refuse_split_logits(self._ranks)
            index = torch.as_tensor(wanted, device=self._device)
            logits = results["logits"][0].index_select(0, index).float().cpu().numpy().reshape(-1)
        self._last_step = _Step(batch, segments, tables, results, branches)
        return _core.StepResult(argmax, logits)

    @torch.inference_mode()
    def commit(self, commits: Sequence[_core.Commit]) -> None:
        """Move accepted rows' KV behind the prefix, and state along them; extend the drafter's
        context by them."""
        step = self._last_step
        if step is None:
            raise ValueError("commit without a step before it")
        _core.check_commits(commits, step.batch)
        _core.check_saves(commits, self._capabilities)
        self._last_step = None
        rows = {c.sequence.request_id: np.asarray(c.rows, dtype=np.int32) for c in commits}
        requests = [segment.sequence.request_id for segment in step.batch.segments]
        paths = [rows.get(request, np.zeros(0, np.int32)) for request in requests]
        accepted, counts = path_table(paths, self._device)
        if any((path != np.arange(len(path))).any() for path in paths):
            self._commit_pages(step.tables, accepted, counts)
        if self._states and step.branches:
            tables = step.branches.to(self._device)
            saves = [
                Save(requests.index(commit.sequence.request_id), save.rows, save.snapshot)
                for commit in commits
                for save in commit.saves
            ]
            self._states.commit(step.results, tables, accepted, counts, saves)
        extended = {c.sequence.request_id for c in commits if c.extend_drafter}
        if "drafter_context" in self._engines:
            kept = [
                path if request in extended else path[:0]
                for request, path in zip(requests, paths, strict=True)
            ]
            self._extend_drafter(step, kept)

    @torch.inference_mode()
    def load_state(self, snapshot: int, slot: int) -> None:
        """Give a slot the state of a snapshot."""
        _core.check_load(snapshot, slot, self._capabilities)
        if self._states:
            self._states.load(snapshot, slot)

    @torch.inference_mode()
    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        """One drafter pass over ``[bonus, mask, ...]`` of every request."""
        _core.check_draft_requests(requests, top_k, self._capabilities)
        block, count = self._capabilities.block_size, len(requests)
        segments = [
            _segment(request.sequence, index * block, block)
            for index, request in enumerate(requests)
        ]
        token_ids = np.full((count, block), self._mask_token, dtype=np.int32)
        token_ids[:, 0] = [request.bonus_token for request in requests]
        rows = np.arange(count * block, dtype=np.int32).reshape(count, block)
        inputs = {
            "token_ids": token_ids.reshape(-1),
            # A block is a chain: position and slot agree.
            "positions": np.concatenate([_slots(segment) for segment in segments]),
            "packed_mask": _packed(np.ones((block, block), dtype=bool), count),
            "causal_mask": _packed(np.tri(block, dtype=bool), count),
            "output_rows": rows[:, 1:].reshape(-1),
        }
        results, _ = self._run("drafter_block", segments, inputs)
        shape = (count, block - 1, -1)
        log_probs, ids = (
            results[role][0, : count * (block - 1)].cpu().numpy().reshape(shape)
            for role in ("log_probs", "token_ids")
        )
        return draft_result(log_probs, ids, top_k)

    def _extend_drafter(self, step: _Step, paths: Sequence[NDArray[np.int32]]) -> None:
        segments, chosen, first = [], [], 0
        for at, path in zip(step.segments, paths, strict=True):
            if len(path):
                segments.append(AttentionSegment(first, len(path), at.prefix_length, at.pages))
                chosen.append(at.first_row + path)
                first += len(path)
        if not segments:
            return
        if "captured" not in step.results:
            raise RuntimeError("the target engine captured no hidden states for the drafter")
        rows = np.concatenate(chosen)
        inputs: dict[str, NDArray[Any] | torch.Tensor] = {
            "captured": step.results["captured"][0].index_select(0, self._moved(rows)),
            "positions": np.asarray(step.batch.positions)[rows],
        }
        self._run("drafter_context", segments, inputs)

    # Runs

    def _run(
        self,
        network: str,
        segments: Sequence[AttentionSegment],
        inputs: Mapping[str, NDArray[Any] | torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], RowTables]:
        """One run over ragged rows; ``inputs`` are by row (or output), without padding.

        Raises:
            IndexError: a position is beyond the engine's.
        """
        engine = self._engines[network]
        limits = engine.spec.profiles[PROFILE]
        furthest = int(np.max(inputs["positions"]))
        if furthest >= self._positions:
            raise IndexError(f"position {furthest}, the engine has {self._positions}")
        num_rows = sum(segment.num_rows for segment in segments)
        sizes = {"rows": rounded_up(num_rows, limits["rows"])}
        if "output_rows" in inputs:
            sizes["outputs"] = rounded_up(max(1, len(inputs["output_rows"])), limits["outputs"])
        tables = row_tables(segments, sizes["rows"])
        given = {name: _tensor(value) for name, value in inputs.items()}
        given |= {
            "slots": tables.slots,
            "requests": tables.requests,
            "page_table": tables.page_table,
            "lengths": row_lengths(segments, sizes["rows"]),
        }
        for plan in engine.spec.plans:
            made = plan_attention(
                segments,
                sizes["rows"],
                kv_heads=plan.kv_heads,
                group=plan.group,
                block_m=plan.block_m,
                target_ctas=self._target_ctas,
                window=plan.window,
                top_k=plan.top_k,
                max_items=plan.max_items,
            )
            items = rounded_up(made.num_items, plan.max_items)
            sizes[f"items{plan.suffix}"] = items
            given[f"work{plan.suffix}"] = made.padded(items).work
            given[f"row_splits{plan.suffix}"] = made.row_splits
        padded = {
            binding.name: _padded(given[binding.name], binding.shape(sizes))
            for binding in engine.spec.inputs
            if binding.name not in {*engine.spec.caches, *engine.spec.branches}
        }
        return engine.run(PROFILE, sizes, padded), tables.to(self._device)

    def _moved(self, array: NDArray[np.int32]) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


def _movable(cache: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, which every device indexes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def refuse_nan_scores(counts: torch.Tensor) -> None:
    """Raises FloatingPointError where a row [rows] has NaN among its indexers' scores."""
    bad = counts.nonzero()
    if len(bad):
        raise FloatingPointError(
            f"index_select: NaN in the scores of row {int(bad[0])}; "
            "a weight or an activation overflowed"
        )


def rounded_up(size: int, most: int) -> int:
    """The next of the few sizes that runs have: a CUDA graph is captured for each."""
    step = 1 << (size - 1).bit_length() if size <= 8 else 8 if size <= 128 else 64
    return min(-(-size // step) * step, max(size, most))


def _segment(sequence: _core.Sequence, first_row: int, num_rows: int) -> AttentionSegment:
    pages = torch.tensor(sequence.pages, dtype=torch.int64)
    return AttentionSegment(first_row, num_rows, sequence.committed_length, pages)


def _slots(segment: AttentionSegment) -> NDArray[np.int32]:
    first = segment.prefix_length
    return np.arange(first, first + segment.num_rows, dtype=np.int32)


def _tensor(x: NDArray[Any] | torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def _padded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros behind x, in every axis; a leading axis of one is added where x lacks it."""
    if x.ndim < len(shape):
        x = x[None]
    if list(x.shape) == list(shape):
        return x
    out = torch.zeros(list(shape), dtype=x.dtype, device=x.device)
    out[tuple(slice(size) for size in x.shape)] = x
    return out


def _packed(visible: NDArray[np.bool_], count: int) -> NDArray[np.int32]:
    """visible [block, block] -> int32 [count * block, words]: the same for each block."""
    block = len(visible)
    padded = np.zeros((block, -(-block // 32) * 32), dtype=bool)
    padded[:, :block] = visible
    words = np.packbits(padded, axis=1, bitorder="little").view("<i4")
    return np.tile(words, (count, 1))
