"""State that branches, on the device, for the TensorRT runner: recurrences and windows.

An engine reads the committed states of a run's slots and returns what each row adds: a key,
an update and a sum of log decays, or a convolution's input. Nothing is written to the state
until commit, which makes it the last accepted row's, for all layers at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trtree import _core
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.branch_tables import SLOT, BranchTables
from trtree.plugins.gated_delta_net.commit import commit as commit_recurrence
from trtree.plugins.gated_delta_net.contract import RowUpdates
from trtree.runtime.engines.tensorrt_buffers import Binding, EngineSpec
from trtree.runtime.engines.tensorrt_commits import Commits

# What rows leave, by kind of state; which axis of a layer's [requests, ...] counts rows.
_PARTS = {"recurrent": ("k", "u", "g"), "conv": ("x",)}
_ROWS_AXIS = {"k": 2, "u": 2, "g": 2, "x": 1}

Kept = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Group:
    """All layers' states of one kind: committed [layers, slots, ...], and by part the memory
    of its outputs, [layers, most numbers of a run]."""

    names: tuple[str, ...]
    committed: torch.Tensor
    outputs: Mapping[str, Binding]  # the first layer's; the others are alike
    memory: Mapping[str, torch.Tensor]


class BranchStates:
    """Committed states of all slots, and the rows' part of the last run.

    Args:
        slots: of all requests together.

    Raises:
        ValueError: layers differ in shape.
    """

    def __init__(self, spec: EngineSpec, slots: int, device: torch.device) -> None:
        self._groups = {
            kind: _group(spec, kind, slots, device)
            for kind in _PARTS
            if kind in spec.branches.values()
        }

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """[slots, ...] by input."""
        return {
            name: group.committed[layer]
            for group in self._groups.values()
            for layer, name in enumerate(group.names)
        }

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """Flat memory by output."""
        return {
            f"output.{name}.{part}": memory[layer]
            for group in self._groups.values()
            for part, memory in group.memory.items()
            for layer, name in enumerate(group.names)
        }

    @property
    def kernel(self) -> int:
        """Inputs of a row of the convolutions; its own where there are none."""
        return self._groups["conv"].committed.shape[2] + 1 if "conv" in self._groups else 1

    def start(self, slot: int) -> None:
        """Nothing is committed: zero, whatever the slot's last owner left."""
        for group in self._groups.values():
            group.committed[:, slot] = 0

    def kept(self, sizes: Mapping[str, int], request: int, rows: int) -> Kept:
        """What the last run left of one request's rows, by part: [layers, ...], in the memory
        that the next run overwrites."""
        return {
            part: _view(memory, group.outputs[part].shape(sizes))[:, request].narrow(
                _ROWS_AXIS[part], 0, rows
            )
            for group in self._groups.values()
            for part, memory in group.memory.items()
        }

    def commit(self, slot: int, kept: Kept, path: NDArray[np.int64]) -> None:
        """Make the state of the path's last row the committed one.

        path: rows of the step, from a child of the committed state on.
        """
        if not len(path):
            return
        for kind, group in self._groups.items():
            committed = group.committed[:, slot]
            index = torch.as_tensor(path, device=committed.device)
            rows = {p: kept[p].index_select(_ROWS_AXIS[p], index) for p in _PARTS[kind]}
            if kind == "recurrent":
                new = commit_recurrence(committed, rows["k"], rows["u"], rows["g"])
            else:
                new = torch.cat([committed, rows["x"]], dim=1)[:, -committed.shape[1] :]
            committed.copy_(new)


@dataclass(frozen=True)
class Save:
    """To a snapshot: the state after the first ``rows`` of the path of the step's ``request``."""

    request: int
    rows: int
    snapshot: int


class RaggedStates:
    """Committed states of an engine with attention plugins, and snapshots of them: its kernels
    take a state as zero where nothing is committed, and commit layer by layer.

    Args:
        snapshots: places for them, behind the slots in the same memory.
    """

    def __init__(
        self, spec: EngineSpec, snapshots: int, device: torch.device, commits: Commits
    ) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        for binding in spec.inputs:
            if binding.name in spec.branches:
                slots, *shape = binding.shape({})
                self._slots = slots
                self._memory[binding.name] = torch.zeros(
                    slots + snapshots, *shape, dtype=binding.dtype, device=device
                )
        self._kinds = spec.branches
        self._commits = commits
        windows = [s for name, s in self._memory.items() if spec.branches[name] == "conv"]
        self._kernel = windows[0].shape[1] + 1 if windows else 1

    @property
    def committed(self) -> dict[str, torch.Tensor]:
        """[slots, ...] by input."""
        return {name: memory[: self._slots] for name, memory in self._memory.items()}

    def load(self, snapshot: int, slot: int) -> None:
        """Give a slot the state of a snapshot."""
        for memory in self._memory.values():
            memory[slot] = memory[self._slots + snapshot]

    def tables(self, batch: _core.RowBatch) -> BranchTables:
        """Of a step, on the host."""
        parents = np.asarray(batch.parents)
        segments = [
            StateSegment(
                segment.first_row,
                segment.num_rows,
                segment.sequence.slot,
                segment.sequence.committed_length == 0,
                parents[segment.first_row : segment.first_row + segment.num_rows].tolist(),
            )
            for segment in batch.segments
        ]
        return BranchTables.of(segments, self._kernel)

    def commit(
        self,
        results: Mapping[str, torch.Tensor],
        tables: BranchTables,
        accepted: torch.Tensor,
        num_accepted: torch.Tensor,
        saves: Sequence[Save] = (),
    ) -> None:
        """By what the step left of its rows; accepted and num_accepted: see path_table.

        A state on the way is a commit of a shorter path, to a copy of what was committed.
        """
        if saves:
            chosen = [save.request for save in saves]
            places = [self._slots + save.snapshot for save in saves]
            rows = torch.tensor([save.rows for save in saves], dtype=torch.int32)
            for memory in self._memory.values():
                memory[places] = memory[tables.requests[chosen, SLOT].long()]
            copies = tables.elsewhere(chosen, places)
            self._move(results, copies, accepted[chosen], rows.to(accepted.device))
        self._move(results, tables, accepted, num_accepted)

    def _move(
        self,
        results: Mapping[str, torch.Tensor],
        tables: BranchTables,
        accepted: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        for name, state in self._memory.items():
            if self._kinds[name] == "conv":
                self._commits.window(state, results[f"{name}.x"], tables, accepted, num_accepted)
            else:
                rows = RowUpdates(*(results[f"{name}.{part}"] for part in _PARTS["recurrent"]))
                self._commits.state(state, rows, tables, accepted, num_accepted)


def _group(spec: EngineSpec, kind: str, slots: int, device: torch.device) -> _Group:
    names = tuple(name for name, k in spec.branches.items() if k == kind)
    inputs = {binding.name: binding for binding in spec.inputs}
    outputs = {binding.name: binding for binding in spec.outputs}
    first = inputs[names[0]]
    if any((inputs[n].dims, inputs[n].dtype) != (first.dims, first.dtype) for n in names):
        raise ValueError(f"{kind} states of different shapes: {[inputs[n].dims for n in names]}")
    shape = [len(names), slots, *(int(dim) for dim in first.dims[1:])]
    parts = {part: outputs[f"output.{names[0]}.{part}"] for part in _PARTS[kind]}
    memory = {
        part: torch.zeros(len(names), spec.largest(b), dtype=b.dtype, device=device)
        for part, b in parts.items()
    }
    return _Group(names, torch.zeros(shape, dtype=first.dtype, device=device), parts, memory)


def _view(memory: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The front of every layer's memory as [layers, *shape]."""
    return memory[:, : torch.Size(shape).numel()].view(len(memory), *shape)
