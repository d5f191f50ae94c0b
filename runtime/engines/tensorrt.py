"""The TensorRT engines behind the executor's contract.

TensorRT has no ragged batch and no pages: a step becomes prefill runs of one request each
and one padded ``[B, W]`` verify run; a request's KV lies in the cache slot the executor
gave it. Slots inside a run's range that are not part of it are padded: whatever is written
for them lands behind their committed prefix, where their next rows go. State that branches
(tensorrt_states.py) lies in the same slots and is only read by a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.plugins.causal_conv.contract import input_table
from trtree.runtime.engines.manifest import capabilities_of
from trtree.runtime.engines.tensorrt_buffers import (
    BoundEngine,
    EngineSpec,
    Executable,
    allocate_caches,
)
from trtree.runtime.engines.tensorrt_states import BranchStates, Kept


@dataclass(frozen=True)
class _Rows:
    """One segment of the last step, for its commit. captured: [rows, features] or None;
    kept: what its rows left of state that branches."""

    sequence: _core.Sequence
    parents: NDArray[np.int32]
    positions: NDArray[np.int32]
    captured: torch.Tensor | None
    kept: Kept


class TensorRTEngine(_core.Engine):
    """Runs an engine directory with ``backend: tensorrt`` or ``tensorrt-rtx``.

    Args:
        executables: a loaded engine per file of this rank.
        device: where its memory is.
        rank: whose engines these are.
    """

    def __init__(
        self,
        engine: EngineDir,
        executables: Mapping[str, Executable],
        device: torch.device,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self._capabilities = _capabilities(engine)
        self._device = device
        self._ranks = engine.manifest["mapping"]["tp_size"]
        built = engine.manifest["tensorrt"]
        self._cache_length: int = built["cache_length"]
        slots = self._capabilities.max_batch_size
        self._kv: dict[str, list[torch.Tensor]] = {}  # by owner, [layers, slots, heads, S, D]
        self._engines: dict[str, BoundEngine] = {}
        self._states: BranchStates | None = None
        caches: dict[str, torch.Tensor] = {}
        for file, entry in built["engines"].items():
            if entry["rank"] != rank:
                continue
            spec = EngineSpec.read(entry)
            owner = entry["network"].partition("_")[0]
            if owner not in self._kv and spec.caches:
                alike = allocate_caches(spec, {"batch": slots}, device)
                self._kv[owner] = list(alike.values())
                for names, memory in alike.items():
                    caches |= dict(zip(names, memory, strict=True))
            own = {name: caches[name] for name in spec.caches}
            outputs: dict[str, torch.Tensor] = {}
            if spec.branches:
                self._states = BranchStates(spec, slots, device)
                own, outputs = own | self._states.inputs, self._states.outputs
            self._engines[entry["network"]] = BoundEngine(
                spec, executables[file], own, device, outputs
            )
        speculative = engine.manifest["speculative_config"]
        self._mask_token = speculative["mask_token_id"] if speculative else 0
        self._lengths = np.zeros(slots, dtype=np.int32)  # committed tokens per slot
        self._last_step: dict[int, _Rows] = {}

    def capabilities(self) -> _core.Capabilities:
        return self._capabilities

    @torch.inference_mode()
    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        """One target pass over every segment; writes KV behind the committed prefixes."""
        _core.check_batch(batch, self._capabilities)
        for segment in batch.segments:
            self._lengths[segment.sequence.slot] = segment.sequence.committed_length
            if self._states and segment.sequence.committed_length == 0:
                self._states.start(segment.sequence.slot)
        self._last_step = {}
        outputs = np.asarray(batch.output_rows)
        argmax = np.zeros(len(outputs), dtype=np.int32)
        logits: dict[int, NDArray[np.float32]] = {}
        groups = self._groups(batch)
        # The verify run comes first: it pads slots whose prefill rows come after.
        for profile, segments in groups:
            result = self._run_target(batch, profile, segments, keep=len(groups) > 1)
            for index, choice, row_logits in result:
                argmax[index] = choice
                if row_logits is not None:
                    logits[index] = row_logits
        refuse_nan(argmax, self._capabilities.vocab_size)
        flat = [logits[index] for index in sorted(logits)]
        return _core.StepResult(argmax, np.concatenate(flat) if flat else np.zeros(0, np.float32))

    @torch.inference_mode()
    def commit(self, commits: Sequence[_core.Commit]) -> None:
        """Move accepted rows' KV and state behind the prefix; extend the drafter's context by
        them."""
        accepted = {c.sequence.request_id: self._accepted(c) for c in commits}
        for commit in commits:
            rows = accepted[commit.sequence.request_id]
            self._move(commit.sequence, rows)
            if self._states:
                kept = self._last_step[commit.sequence.request_id].kept
                self._states.commit(commit.sequence.slot, kept, rows)
        extended = [c for c in commits if c.extend_drafter and len(c.rows)]
        if "drafter_context" in self._engines:
            self._extend_drafter([(c.sequence, accepted[c.sequence.request_id]) for c in extended])
        for commit in commits:
            self._lengths[commit.sequence.slot] += len(commit.rows)

    @torch.inference_mode()
    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        """One drafter pass over ``[bonus, mask, ...]`` of every request."""
        _core.check_draft_requests(requests, top_k, self._capabilities)
        block = self._capabilities.block_size
        for request in requests:
            self._lengths[request.sequence.slot] = request.sequence.committed_length
        first, count = _slot_range([request.sequence for request in requests])
        self._check_room(range(first, first + count), block)
        token_ids = np.full((count, block), self._mask_token, dtype=np.int32)
        for request in requests:
            token_ids[request.sequence.slot - first, 0] = request.bonus_token
        lengths = self._lengths[first : first + count]
        sizes = {"batch": count, "rows": block, "outputs": max(1, block - 1)}
        inputs: dict[str, NDArray[Any] | torch.Tensor] = {
            "token_ids": token_ids,
            "positions": lengths[:, None] + np.arange(block, dtype=np.int32),
            "committed_lengths": lengths,
            "tree_mask": np.ones((count, block, block), dtype=bool),
            "causal_mask": np.tile(np.tri(block, dtype=bool), (count, 1, 1)),
            "output_rows": np.tile(np.arange(1, block, dtype=np.int32), (count, 1)),
        }
        results = self._run("drafter_block", "block", first, sizes, inputs)
        chosen = [request.sequence.slot - first for request in requests]
        return draft_result(
            results["log_probs"].cpu().numpy()[chosen],
            results["token_ids"].cpu().numpy()[chosen],
            top_k,
        )

    # Steps

    def _groups(self, batch: _core.RowBatch) -> list[tuple[str, list[int]]]:
        """Segment indices by run: at most one verify run, then one per prefill chunk."""
        wanted = np.zeros(batch.num_rows, dtype=bool)
        wanted[np.asarray(batch.output_rows)] = True
        verify, prefill = [], []
        width = self._engines["target"].spec.profiles["verify"]["rows"]
        for index, segment in enumerate(batch.segments):
            outputs = int(wanted[_slice(segment)].sum())
            if outputs == segment.num_rows and segment.num_rows <= width:
                verify.append(index)
            elif outputs <= 1:
                prefill.append(index)
            else:
                raise ValueError(
                    f"request {segment.sequence.request_id}: {outputs} output rows of "
                    f"{segment.num_rows}; the engine gives all of at most {width}, or one"
                )
        groups = [("verify", verify)] if verify else []
        return groups + [("prefill", [index]) for index in prefill]

    def _run_target(
        self, batch: _core.RowBatch, profile: str, chosen: Sequence[int], *, keep: bool
    ) -> list[tuple[int, int, NDArray[np.float32] | None]]:
        """One run; returns per output (its index, the argmax, logits if wanted).

        ``keep``: another run follows, which overwrites captured states and what rows leave.
        """
        segments = [batch.segments[index] for index in chosen]
        first, count = _slot_range([segment.sequence for segment in segments])
        width = max(segment.num_rows for segment in segments)
        self._check_room(range(first, first + count), width)
        lengths = self._lengths[first : first + count]
        token_ids = np.zeros((count, width), dtype=np.int32)
        positions = np.repeat(lengths[:, None], width, axis=1)
        mask = np.tile(np.eye(width, dtype=bool), (count, 1, 1))  # padding sees itself
        parents = np.full((count, width), -1, dtype=np.int32)
        bits = _unpacked(batch)
        output_rows = np.zeros((count, width if profile == "verify" else 1), dtype=np.int32)
        wanted = np.asarray(batch.output_rows)
        for segment in segments:
            at, rows, own = segment.sequence.slot - first, _slice(segment), segment.num_rows
            token_ids[at, :own] = np.asarray(batch.token_ids)[rows]
            positions[at, :own] = np.asarray(batch.positions)[rows]
            mask[at, :own, :own] = bits[rows, :own]
            parents[at, :own] = np.asarray(batch.parents)[rows]
            inside = wanted[(wanted >= rows.start) & (wanted < rows.stop)] - rows.start
            output_rows[at, : len(inside)] = inside
        inputs = {
            "token_ids": token_ids,
            "positions": positions,
            "committed_lengths": lengths,
            "tree_mask": mask,
            "output_rows": output_rows,
        }
        if self._states:
            tables = [input_table(row, self._states.kernel) for row in parents]
            inputs["conv_inputs"] = np.stack(tables)
        sizes = {"batch": count, "rows": width, "outputs": output_rows.shape[1]}
        results = self._run("target", profile, first, sizes, inputs)
        captured = results.get("captured")
        if captured is not None and keep:
            captured = captured.clone()
        for segment in segments:
            at, rows = segment.sequence.slot - first, _slice(segment)
            kept = self._states.kept(sizes, at, segment.num_rows) if self._states else {}
            self._last_step[segment.sequence.request_id] = _Rows(
                segment.sequence,
                np.asarray(batch.parents)[rows],
                np.asarray(batch.positions)[rows],
                None if captured is None else captured[at, : segment.num_rows],
                {part: x.clone() for part, x in kept.items()} if keep else kept,
            )
        return self._outputs(batch, segments, first, results)

    def _outputs(
        self,
        batch: _core.RowBatch,
        segments: Sequence[_core.Segment],
        first: int,
        results: Mapping[str, torch.Tensor],
    ) -> list[tuple[int, int, NDArray[np.float32] | None]]:
        choices = results["argmax"].cpu().numpy()
        wanted = np.asarray(batch.output_rows)
        found: list[tuple[int, int, NDArray[np.float32] | None]] = []
        for segment in segments:
            at, rows = segment.sequence.slot - first, _slice(segment)
            inside = np.flatnonzero((wanted >= rows.start) & (wanted < rows.stop))
            for place, index in enumerate(inside.tolist()):
                logits = None
                if batch.needs_logits[index]:
                    refuse_split_logits(self._ranks)
                    logits = results["logits"][at, place].float().cpu().numpy()
                found.append((index, int(choices[at, place]), logits))
        return found

    def _run(
        self,
        network: str,
        profile: str,
        first_slot: int,
        sizes: Mapping[str, int],
        inputs: Mapping[str, NDArray[Any] | torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        engine = self._engines[network]
        names = {binding.name for binding in engine.spec.inputs}
        given = {name: torch.as_tensor(x) for name, x in inputs.items() if name in names}
        sizes = {n: s for n, s in sizes.items() if n in engine.spec.profiles[profile]}
        slots = slice(first_slot, first_slot + sizes["batch"])
        return engine.run(profile, sizes, given, slots)

    def _check_room(self, slots: range, rows: int) -> None:
        """TensorRT drops rows outside the cache without a word."""
        for slot in slots:
            if self._lengths[slot] + rows > self._cache_length:
                raise IndexError(
                    f"slot {slot}: {rows} rows behind {self._lengths[slot]} committed tokens, "
                    f"the cache holds {self._cache_length}"
                )

    # Commits

    def _accepted(self, commit: _core.Commit) -> NDArray[np.int64]:
        """The rows, checked to be a path from the committed prefix.

        Raises:
            ValueError: they are not, or the request was not in the last step.
        """
        request_id = commit.sequence.request_id
        step = self._last_step.get(request_id)
        if step is None:
            raise ValueError(f"request {request_id}: commit without rows in the last step")
        rows = np.asarray(commit.rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(step.parents)):
            raise ValueError(
                f"request {request_id}: commit of row {rows.max()} of {len(step.parents)}"
            )
        if step.parents[rows].tolist() != [-1, *rows.tolist()][: len(rows)]:
            raise ValueError(f"request {request_id}: rows {rows.tolist()} are no path of the step")
        return rows

    def _move(self, sequence: _core.Sequence, rows: NDArray[np.int64]) -> None:
        """Gather the accepted rows' keys and values (or latents), of all layers at once."""
        if np.array_equal(rows, np.arange(len(rows))):
            return
        source = torch.as_tensor(sequence.committed_length + rows, device=self._device)
        start, end = sequence.committed_length, sequence.committed_length + len(rows)
        for memory in self._kv["target"]:
            cache = memory[:, sequence.slot]
            cache[:, :, start:end] = cache.index_select(2, source)

    def _extend_drafter(self, accepted: Sequence[tuple[_core.Sequence, NDArray[np.int64]]]) -> None:
        """Runs in the order of the step's: slots that are padded come first."""
        width = self._engines["drafter_context"].spec.profiles["verify"]["rows"]
        together = [(s, rows) for s, rows in accepted if len(rows) <= width]
        alone = [[(s, rows)] for s, rows in accepted if len(rows) > width]
        for group in ([together] if together else []) + alone:
            self._run_context(group, "verify" if group is together else "prefill")

    def _run_context(
        self, group: Sequence[tuple[_core.Sequence, NDArray[np.int64]]], profile: str
    ) -> None:
        first, count = _slot_range([sequence for sequence, _ in group])
        width = max(len(rows) for _, rows in group)
        self._check_room(range(first, first + count), width)
        lengths = self._lengths[first : first + count]
        positions = np.repeat(lengths[:, None], width, axis=1)
        features = self._captured(group[0][0].request_id).shape[-1]
        captured = torch.zeros(
            count,
            width,
            features,
            dtype=self._captured(group[0][0].request_id).dtype,
            device=self._device,
        )
        for sequence, rows in group:
            at = sequence.slot - first
            positions[at, : len(rows)] = self._last_step[sequence.request_id].positions[rows]
            index = torch.as_tensor(rows, device=self._device)
            captured[at, : len(rows)] = self._captured(sequence.request_id)[index]
        inputs: dict[str, NDArray[Any] | torch.Tensor] = {
            "captured": captured,
            "positions": positions,
            "committed_lengths": lengths,
        }
        self._run("drafter_context", profile, first, {"batch": count, "rows": width}, inputs)

    def _captured(self, request_id: int) -> torch.Tensor:
        captured = self._last_step[request_id].captured
        if captured is None:
            raise RuntimeError("the target engine captured no hidden states for the drafter")
        return captured


def _capabilities(engine: EngineDir) -> _core.Capabilities:
    c: _core.Capabilities = capabilities_of(engine)
    c.kv_layout = _core.KvLayout.CONTIGUOUS
    c.page_size = c.num_pages = 0
    c.sm = ",".join(map(str, engine.manifest["sm"]))
    return c


def refuse_nan(argmax: NDArray[np.int32], vocab_size: int) -> None:
    """A row with NaN among its logits has no argmax within the vocabulary.

    Raises:
        FloatingPointError: names the first such row.
    """
    bad = np.flatnonzero((argmax < 0) | (argmax >= vocab_size))
    if len(bad):
        raise FloatingPointError(
            f"argmax: NaN in the logits of output row {bad[0]}; "
            "a weight or an activation overflowed"
        )


def refuse_split_logits(ranks: int) -> None:
    """Raises ValueError where no rank has whole logits."""
    if ranks > 1:
        raise ValueError(
            f"logits: each of {ranks} ranks holds its part of the "
            "vocabulary; they are given on one rank only"
        )


def draft_result(
    log_probs: NDArray[np.float32], ids: NDArray[np.int32], top_k: int
) -> _core.DraftResult:
    """[requests, depth, k], best ``top_k`` first; TopK promises no order among equals, here the
    lower id comes first."""
    order = np.lexsort((ids, -log_probs), axis=-1)[..., :top_k]
    return _core.DraftResult(
        np.ascontiguousarray(np.take_along_axis(log_probs, order, -1)),
        np.ascontiguousarray(np.take_along_axis(ids, order, -1)),
    )


def _slot_range(sequences: Sequence[_core.Sequence]) -> tuple[int, int]:
    """The first slot, and how many from it to the last."""
    slots = [sequence.slot for sequence in sequences]
    return min(slots), max(slots) - min(slots) + 1


def _slice(segment: _core.Segment) -> slice:
    return slice(segment.first_row, segment.first_row + segment.num_rows)


def _unpacked(batch: _core.RowBatch) -> NDArray[np.bool_]:
    """bool [rows, 32 * words]: which rows of its own segment each row sees."""
    words = np.asarray(batch.packed_mask).reshape(-1, batch.mask_words)
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little").astype(bool)
