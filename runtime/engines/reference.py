"""The reference engine: the stored networks run by the reference lowering.

Slow and obvious; the oracle for every other engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.build.lowering.reference import (
    TORCH_DTYPES,
    ReferenceNetwork,
    StepContext,
    paged_kv,
)
from trtree.build.lowering.reference_weights import SUFFIX, load_networks
from trtree.build.network.network import Owner, State
from trtree.plugins import branch_state, latent_cache
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.tree_attention import reference as attention
from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv
from trtree.runtime.engines.manifest import capabilities_of, check_kv_cache


@dataclass(frozen=True)
class _Step:
    """What a commit needs of the step before it."""

    batch: _core.RowBatch
    segments: Mapping[int, AttentionSegment]  # by request id
    positions: torch.Tensor  # int32 [rows]
    captured: torch.Tensor | None  # [rows, captures * hidden]
    branches: Mapping[int, StateSegment]  # by request id
    row_states: Mapping[str, torch.Tensor]  # by state name, [rows, ...]


class ReferenceEngine(_core.Engine):
    """Runs an engine directory with ``backend: reference``."""

    def __init__(self, engine: EngineDir) -> None:
        super().__init__()
        self._capabilities = capabilities_of(engine)
        files: dict[Owner, str] = {"target": "target.rank0", "drafter": "drafter.rank0"}
        self._networks = load_networks(
            engine.networks(),
            {
                owner: engine.path / f"{name}.{SUFFIX}"
                for owner, name in files.items()
                if (engine.path / f"{name}.{SUFFIX}").is_file()
            },
        )
        states = {
            state.name: state
            for loaded in self._networks.values()
            for state in loaded.network.states.values()
        }
        check_kv_cache(
            engine,
            (s.dtype for s in self._networks["target"].network.states.values() if s.kind == "kv"),
        )
        self._caches = {s.name: self._cache(s) for s in states.values() if s.kind == "kv"}
        self._latents = {s.name: self._latent(s) for s in states.values() if s.kind == "latent"}
        slots, snapshots = (
            self._capabilities.max_batch_size,
            self._capabilities.state_snapshots,
        )
        branching = [s for s in states.values() if not s.paged]
        self._committed = {s.name: _states(slots, s) for s in branching}
        self._saved = {s.name: _states(snapshots, s) for s in branching}
        speculative = engine.manifest["speculative_config"]
        self._mask_token = speculative["mask_token_id"] if speculative else 0
        self._last_step: _Step | None = None

    def capabilities(self) -> _core.Capabilities:
        return self._capabilities

    @property
    def networks(self) -> Mapping[str, ReferenceNetwork]:
        """The networks by name, for tests that look at single ops."""
        return self._networks

    @torch.inference_mode()
    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        """One target pass; writes the rows' KV behind each request's committed prefix."""
        _core.check_batch(batch, self._capabilities)
        segments = {s.sequence.request_id: _segment(s) for s in batch.segments}
        branches = {s.sequence.request_id: _branch(s, batch) for s in batch.segments}
        inputs = {
            "token_ids": torch.tensor(batch.token_ids),
            "parents": torch.tensor(batch.parents),
            "positions": torch.tensor(batch.positions),
            "slots": _slots(list(segments.values())),
            "packed_mask": torch.tensor(batch.packed_mask).reshape(-1, batch.mask_words),
            "output_rows": torch.tensor(batch.output_rows),
        }
        row_states: dict[str, torch.Tensor] = {}
        outputs = self._networks["target"].run(
            inputs,
            StepContext(
                self._caches,
                list(segments.values()),
                self._committed,
                list(branches.values()),
                row_states,
                self._latents,
            ),
        )
        captured = outputs.get("captured")
        self._last_step = _Step(
            batch, segments, inputs["positions"], captured, branches, row_states
        )
        wanted = np.asarray(batch.needs_logits, dtype=bool)
        logits = outputs["logits"].float().numpy()[wanted]
        return _core.StepResult(outputs["argmax"].numpy(), logits.reshape(-1))

    @torch.inference_mode()
    def commit(self, commits: Sequence[_core.Commit]) -> None:
        """Move accepted rows' KV behind the prefix; extend the drafter's context by them."""
        step = self._last_step
        if step is None:
            raise ValueError("commit without a step before it")
        _core.check_commits(commits, step.batch)
        _core.check_saves(commits, self._capabilities)
        self._last_step = None
        accepted = {c.sequence.request_id: torch.tensor(c.rows, dtype=torch.int64) for c in commits}
        for request_id, rows in accepted.items():
            for name in self._networks["target"].network.states:
                if name in self._caches:
                    attention.commit(self._caches[name], step.segments[request_id], rows)
                elif name in self._latents:
                    latent_cache.commit(self._latents[name], step.segments[request_id], rows)
            for name, states in step.row_states.items():
                branch_state.commit(
                    self._committed[name], states, step.branches[request_id], rows.tolist()
                )
        for commit in commits:
            first = step.segments[commit.sequence.request_id].first_row
            for save in commit.saves:
                row = first + int(commit.rows[save.rows - 1])
                for name, states in step.row_states.items():
                    self._saved[name][save.snapshot] = states[row]
        self._extend_drafter(
            step,
            {
                c.sequence.request_id: accepted[c.sequence.request_id]
                for c in commits
                if c.extend_drafter
            },
        )

    @torch.inference_mode()
    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        """One drafter pass over ``[bonus, mask, ...]`` of every request."""
        _core.check_draft_requests(requests, top_k, self._capabilities)
        block = self._capabilities.block_size
        segments = [
            AttentionSegment(
                index * block,
                block,
                request.sequence.committed_length,
                torch.tensor(request.sequence.pages, dtype=torch.int64),
            )
            for index, request in enumerate(requests)
        ]
        token_ids = torch.full((len(requests), block), self._mask_token, dtype=torch.int32)
        token_ids[:, 0] = torch.tensor([request.bonus_token for request in requests])
        rows = torch.arange(len(requests) * block, dtype=torch.int32).reshape(-1, block)
        inputs = {
            "token_ids": token_ids.flatten(),
            "positions": _slots(segments),  # a block is a chain: position and slot agree
            "slots": _slots(segments),
            "packed_mask": _block_mask(np.ones((block, block)), len(requests)),
            "causal_mask": _block_mask(np.tri(block), len(requests)),
            "output_rows": rows[:, 1:].flatten(),
        }
        outputs = self._run("drafter_block", inputs, segments)
        shape = (len(requests), block - 1, -1)
        return _core.DraftResult(
            outputs["log_probs"].reshape(shape)[..., :top_k].contiguous().numpy(),
            outputs["token_ids"].reshape(shape)[..., :top_k].contiguous().numpy(),
        )

    def load_state(self, snapshot: int, slot: int) -> None:
        """Give a slot the state of a snapshot."""
        _core.check_load(snapshot, slot, self._capabilities)
        for name, committed in self._committed.items():
            committed[slot] = self._saved[name][snapshot]

    def _extend_drafter(self, step: _Step, accepted: Mapping[int, torch.Tensor]) -> None:
        if not accepted or step.captured is None:
            return
        segments: list[AttentionSegment] = []
        global_rows: list[torch.Tensor] = []
        first = 0
        for request_id, rows in accepted.items():
            at = step.segments[request_id]
            segments.append(AttentionSegment(first, len(rows), at.prefix_length, at.pages))
            global_rows.append(at.first_row + rows)
            first += len(rows)
        chosen = torch.cat(global_rows)
        inputs = {
            "captured": step.captured[chosen],
            "positions": step.positions[chosen],
            "slots": _slots(segments),
        }
        self._run("drafter_context", inputs, segments)

    def _run(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        segments: Sequence[AttentionSegment],
    ) -> dict[str, torch.Tensor]:
        return self._networks[name].run(inputs, StepContext(self._caches, segments))

    def _cache(self, state: State) -> PagedKv:
        return paged_kv(state, self._capabilities.num_pages, self._capabilities.page_size)

    def _latent(self, state: State) -> LatentCache:
        shape = (self._capabilities.num_pages, self._capabilities.page_size, state.head_dim)
        return LatentCache(torch.zeros(shape, dtype=TORCH_DTYPES[state.dtype]))


def _states(count: int, state: State) -> torch.Tensor:
    return torch.zeros((count, *state.shape), dtype=TORCH_DTYPES[state.dtype])


def _segment(segment: _core.Segment) -> AttentionSegment:
    return AttentionSegment(
        segment.first_row,
        segment.num_rows,
        segment.sequence.committed_length,
        torch.tensor(segment.sequence.pages, dtype=torch.int64),
    )


def _branch(segment: _core.Segment, batch: _core.RowBatch) -> StateSegment:
    first, count = segment.first_row, segment.num_rows
    return StateSegment(
        first,
        count,
        segment.sequence.slot,
        segment.sequence.committed_length == 0,
        batch.parents[first : first + count].tolist(),
    )


def _slots(segments: Sequence[AttentionSegment]) -> torch.Tensor:
    """int32 [rows]: sequential behind each request's prefix."""
    return torch.cat(
        [torch.arange(s.prefix_length, s.prefix_length + s.num_rows) for s in segments]
    ).int()


def _block_mask(visible: NDArray[np.float64], count: int) -> torch.Tensor:
    """visible [block, block] -> packed int32 [count * block, words]: the same for each block."""
    block = len(visible)
    padded = np.zeros((block, -(-block // 32) * 32), dtype=bool)
    padded[:, :block] = visible
    words = np.packbits(padded, axis=1, bitorder="little").view("<i4")
    return torch.tensor(np.tile(words, (count, 1)))
