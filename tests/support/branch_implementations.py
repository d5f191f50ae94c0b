"""Implementations of state that branches, as the shared tables take them: the kernels,
interpreted, and TensorRT's layers, evaluated, with the runner's states around them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorrt_rtx as trt
import torch

from evaluated_engine import ReferenceCommits
from network_evaluator import NetworkEvaluator
from plugin_layers import plugin_layer
from trtree.build.lowering.tensorrt.context import BATCH, OUTPUTS, ROWS
from trtree.build.lowering.tensorrt.lower import LoweredNetwork, lower
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.graph import Graph, WeightInfo
from trtree.build.network.network import Owner
from trtree.build.network.weight_source import KeyHeads
from trtree.plugins.branch_cases import masks
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.branch_tables import BranchTables, path_table
from trtree.plugins.causal_conv import cases as conv_table
from trtree.plugins.causal_conv import launch as conv
from trtree.plugins.causal_conv.cases import ConvCaseInputs
from trtree.plugins.causal_conv.contract import input_table
from trtree.plugins.causal_conv.specs import ConvLayer
from trtree.plugins.gated_delta_net import cases as delta_table
from trtree.plugins.gated_delta_net import launch as delta
from trtree.plugins.gated_delta_net.cases import DeltaCaseInputs
from trtree.plugins.gated_delta_net.contract import RowUpdates
from trtree.plugins.gated_delta_net.specs import DeltaConfig
from trtree.plugins.registry import PLUGINS
from trtree.plugins.tensorrt_plugin import PluginLayer
from trtree.runtime.engines import tensorrt_states
from trtree.runtime.engines.tensorrt_buffers import Binding, EngineSpec

CPU = torch.device("cpu")
KERNEL = 4  # of tables whose convolution nobody looks at


def delta_kernels(inputs: DeltaCaseInputs) -> tuple[torch.Tensor, delta_table.Committer]:
    tables = BranchTables.of(inputs.segments, KERNEL)
    state = inputs.committed.clone()
    # A model's q, k and v are parts of one row.
    parts = [x.flatten(1) for x in (inputs.q, inputs.k, inputs.v)]
    together = torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)
    q, k, v = (
        part.unflatten(1, x.shape[1:])
        for part, x in zip(together, (inputs.q, inputs.k, inputs.v), strict=True)
    )
    # Of SM 80, or of the others.
    columns = (16, 32)[len(inputs.q) % 2]
    out, rows = delta.gated_delta_net(
        q,
        k,
        v,
        inputs.a,
        inputs.b,
        inputs.gates,
        state,
        tables,
        masks(inputs.segments),
        key_columns=columns,
    )
    assert torch.equal(state, inputs.committed)  # read only until commit

    def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
        moved = inputs.committed.clone()
        delta.commit(moved, rows, tables, *path_table(paths, CPU))
        return moved

    return out, commit


def conv_kernels(inputs: ConvCaseInputs) -> tuple[torch.Tensor, conv_table.Committer]:
    tables = BranchTables.of(inputs.segments, inputs.weight.shape[1])
    window = inputs.committed.clone()
    out = conv.causal_conv(inputs.x, inputs.weight, window, tables, rows_per_program=64)
    assert torch.equal(window, inputs.committed)

    def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
        moved = inputs.committed.clone()
        conv.commit(moved, inputs.x, tables, *path_table(paths, CPU))
        return moved

    return out, commit


KEEP: list[Any] = []  # builders have to outlive what they built


class Implied:
    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        return WeightInfo("dense", implied, "float32")


class Step:
    """A network of one op, and the runner's states around it; every row is padded to the
    widest request. The committed states are those of the slots in use, and one more."""

    def __init__(self, lowered: LoweredNetwork, segments: Sequence[StateSegment]) -> None:
        self.width = max(s.num_rows for s in segments)
        self.segments = {s.slot: s for s in segments}
        sizes = {BATCH: len(segments) + 1, ROWS: self.width, OUTPUTS: 1}
        spec = EngineSpec(
            tuple(
                Binding(b.name, getattr(torch, b.dtype), b.dims, b.alias) for b in lowered.inputs
            ),
            tuple(
                Binding(b.name, getattr(torch, b.dtype), b.dims, b.alias) for b in lowered.outputs
            ),
            {"step": sizes},
            branches=lowered.branches,
        )
        self.sizes = sizes
        self.states = tensorrt_states.BranchStates(spec, sizes[BATCH], torch.device("cpu"))
        self._evaluator = NetworkEvaluator(trt, lowered.definition, lowered.constants)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [slots, width, ...]."""
        out = torch.zeros(self.sizes[BATCH], self.width, *x.shape[1:], dtype=x.dtype)
        for slot, s in self.segments.items():
            out[slot, : s.num_rows] = x[s.first_row : s.first_row + s.num_rows]
        return out

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[slots, width, ...] -> [rows, ...]."""
        segments = sorted(self.segments.items(), key=lambda item: item[1].first_row)
        return torch.cat([x[slot, : s.num_rows] for slot, s in segments])

    def run(self, inputs: dict[str, torch.Tensor], kernel: int) -> dict[str, torch.Tensor]:
        parents = torch.full((self.sizes[BATCH], self.width), -1)
        for slot, s in self.segments.items():
            parents[slot, : s.num_rows] = torch.tensor(s.parents)
        mask = torch.eye(self.width, dtype=torch.bool).repeat(len(parents), 1, 1)
        for row in range(self.width):
            for slot, parent in enumerate(parents[:, row].tolist()):
                if parent >= 0:
                    mask[slot, row] |= mask[slot, parent]
        depth = mask.sum(-1) - 1
        tables = [torch.from_numpy(input_table(row.tolist(), kernel)) for row in parents]
        known = {
            "positions": (depth + 7).int(),
            "committed_lengths": torch.full((len(parents),), 7, dtype=torch.int32),
            "tree_mask": mask,
            "conv_inputs": torch.stack(tables),
            "token_ids": torch.zeros_like(parents, dtype=torch.int32),
            "output_rows": torch.zeros(len(parents), 1, dtype=torch.int32),
        }
        given = {**known, **inputs, **self.states.inputs}
        values = self._evaluator.run({n: given[n] for n in self._evaluator.inputs})
        for name, memory in self.states.outputs.items():
            memory[: values[name].numel()] = values[name].flatten()
        return values

    def commit(self, committed: torch.Tensor) -> Callable[[Sequence[Sequence[int]]], torch.Tensor]:
        def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
            (state,) = self.states.inputs.values()
            before = state.clone()
            for s, path in zip(sorted_segments(self.segments), paths, strict=True):
                kept = self.states.kept(self.sizes, s.slot, s.num_rows)
                self.states.commit(s.slot, kept, torch.tensor(path, dtype=torch.int64).numpy())
            moved = committed.clone()
            for s, path in zip(sorted_segments(self.segments), paths, strict=True):
                if path:
                    moved[s.slot] = state[s.slot]
            state.copy_(before)
            return moved

        return commit

    def fill(self, committed: torch.Tensor) -> None:
        (state,) = self.states.inputs.values()
        state.copy_(committed)
        for slot, s in self.segments.items():
            if s.fresh:
                self.states.start(slot)


def sorted_segments(segments: dict[int, StateSegment]) -> list[StateSegment]:
    return sorted(segments.values(), key=lambda s: s.first_row)


def graph() -> Graph:
    g = Graph("target", Implied())
    g.rows()
    return g


def lowered_graph(g: Graph, weights: dict[str, torch.Tensor], most: int) -> LoweredNetwork:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    lowered = lower(trt, builder, g.network, Encoding(), weights, 8 + most, max_rows=most)
    KEEP.append((builder, lowered))
    return lowered


def delta_layers(inputs: DeltaCaseInputs) -> tuple[torch.Tensor, delta_table.Committer]:
    g = graph()
    flat = {name: getattr(inputs, name).float().flatten(1) for name in "qkvab"}
    x = {name: g.input(name, ("rows", x.shape[1]), "float32") for name, x in flat.items()}
    heads = {n: g.split_heads(f"{n}.heads", x[n], getattr(inputs, n).shape[1]) for n in "qkv"}
    out = g.gated_delta_net("delta", heads["q"], heads["k"], heads["v"], x["a"], x["b"])
    g.output("out", g.merge_heads("merged", out))
    most = max(s.num_rows for s in inputs.segments)
    (weight,) = g.network.weights
    step = Step(lowered_graph(g, {f"{weight}.weight": inputs.gates}, most), inputs.segments)
    step.fill(inputs.committed)
    values = step.run({name: step.padded(x) for name, x in flat.items()}, 1)
    result = step.rows(values["output.out"]).unflatten(1, inputs.v.shape[1:])
    return result, step.commit(inputs.committed)


def conv_layers(inputs: ConvCaseInputs) -> tuple[torch.Tensor, conv_table.Committer]:
    g = graph()
    channels, kernel = inputs.weight.shape
    # Of an op, as in a model: what a network takes cannot be what it gives.
    x = g.concat("x", [g.input(f"x{i}", ("rows", channels // 2), "float32") for i in range(2)])
    g.output("out", g.causal_conv("conv", x, kernel, KeyHeads(1)))
    most = max(s.num_rows for s in inputs.segments)
    (weight,) = g.network.weights
    weights = {f"{weight}.weight": inputs.weight.flatten()}
    step = Step(lowered_graph(g, weights, most), inputs.segments)
    step.fill(inputs.committed.float())
    halves = step.padded(inputs.x.float()).chunk(2, dim=-1)
    values = step.run({f"x{i}": half.contiguous() for i, half in enumerate(halves)}, kernel)
    committer = step.commit(inputs.committed.float())
    return step.rows(values["output.out"]), lambda paths: committer(paths).to(inputs.x.dtype)


def run_plugin(plugin: str, config: Any, known: dict[str, torch.Tensor]) -> None:
    """The evaluator's results of a plugin layer, rounded, into ``known``."""
    (of,) = [candidate for candidate in PLUGINS if candidate.name == plugin]
    types = of.spec(config, 120).types
    operands = [known[name] for name in of.input_names]
    results = plugin_layer(plugin, PluginLayer(config, 120).to_json(), operands)
    for name, result in zip(of.output_names, results, strict=True):
        known[name] = result.to(torch.float32 if types[name] == "*fp32" else config.dtype)


def ragged_tables(
    segments: Sequence[StateSegment], kernel: int
) -> tuple[BranchTables, dict[str, torch.Tensor]]:
    """As the runner gives them: with a row of nobody's, and an idle request."""
    tables = BranchTables.of(segments, kernel)
    pad = torch.nn.functional.pad
    return tables, {
        "requests": pad(tables.requests, (0, 0, 0, 1)),
        "owners": pad(tables.owners, (0, 1), value=-1),
        "inputs": pad(tables.conv_inputs, (0, 0, 0, 1)),
        "packed_mask": pad(masks(segments), (0, 0, 0, 1)),
    }


def delta_plugins(inputs: DeltaCaseInputs) -> tuple[torch.Tensor, delta_table.Committer]:
    tables, known = ragged_tables(inputs.segments, KERNEL)
    for name in "qkvab":
        x = getattr(inputs, name)
        known[name] = torch.cat([x, torch.full_like(x[:1], torch.nan)])
    known |= {"gates": inputs.gates, "state": inputs.committed}
    rows, key_heads, key_dim = inputs.k.shape
    heads, value_dim = inputs.v.shape[1:]
    layer = DeltaConfig(key_dim, value_dim, heads, heads // key_heads, inputs.v.dtype)
    run_plugin("gated_delta_decay", layer, known)
    run_plugin("gated_delta_net", layer, known)
    assert all(torch.isnan(known[name][rows:]).all() for name in ("decay", "update", "out"))
    kept = RowUpdates(known["k"], known["update"], known["decay"])

    def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
        moved = inputs.committed.clone()
        ReferenceCommits().state(moved, kept, tables, *path_table(paths, CPU))
        return moved

    return known["out"][:rows], commit


def conv_plugins(inputs: ConvCaseInputs) -> tuple[torch.Tensor, conv_table.Committer]:
    tables, known = ragged_tables(inputs.segments, inputs.weight.shape[1])
    x = torch.cat([inputs.x, torch.full_like(inputs.x[:1], torch.nan)])
    known |= {"x": x, "weight": inputs.weight, "window": inputs.committed}
    run_plugin("causal_conv", ConvLayer(inputs.weight.shape[1], inputs.x.dtype), known)
    assert torch.isnan(known["out"][-1:]).all()

    def commit(paths: Sequence[Sequence[int]]) -> torch.Tensor:
        moved = inputs.committed.clone()
        ReferenceCommits().window(moved, x, tables, *path_table(paths, CPU))
        return moved

    return known["out"][:-1], commit
