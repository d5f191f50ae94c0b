"""The CPU lowering: networks -> a plan (ops over buffers) and packed weights.

Splits and reshapes become views, and tensors share buffers once nothing reads them any
more. The plan is plain JSON (``plan.json``, one for each rank);
``runtime/cpp/cpu/plan.hpp`` documents its fields. Weights are packed for the kernels
(``plugins/nvfp4_linear/README.md``, ``plugins/dense_linear/README.md``) and memory-mapped,
each at a multiple of 64 bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trtree.build.engine_dir import EngineDirWriter, plan_file, weights_file
from trtree.build.lowering.division import TILE, WHOLE, Shard, segment_bounds
from trtree.build.lowering.packing import align, append_linear, append_rows
from trtree.build.lowering.shard import RankNetworks
from trtree.build.lowering.weights import View, WeightPlan, WeightReader, read_linear, read_vector
from trtree.build.network.network import (
    Network,
    NetworkError,
    Op,
    Owner,
    Weight,
)
from trtree.build.resumable import ResumableFile
from trtree.plugins.dense_linear import cpu as dense_cpu
from trtree.plugins.nvfp4_linear import cpu as nvfp4_cpu
from trtree.plugins.nvfp4_linear.format import BLOCK

SUFFIX = "bin"


def write_files(
    out: EngineDirWriter,
    ranks: Sequence[RankNetworks],
    checkpoints: Mapping[Owner, WeightReader],
    progress: Callable[[int], None],
) -> None:
    """Write every owner's packed weights and the plan, of each rank.

    All ranks at the same time, a weight after the other: a checkpoint is read once, however
    large it is.
    """
    readers = [rank.readers(checkpoints) for rank in ranks]
    entries: list[dict[str, dict[str, Any]]] = [{} for _ in ranks]
    for owner in checkpoints:
        with ExitStack() as stack:
            files = [
                stack.enter_context(out.resumable(weights_file(owner, rank.shard.rank, SUFFIX)))
                for rank in ranks
            ]
            for name in [w.name for w in ranks[0].weights.stored.values() if w.owner == owner]:
                for rank, reader, file, known in zip(ranks, readers, files, entries, strict=True):
                    start = file.tell()
                    weight = rank.weights.stored[name]
                    entry = known[name] = write_weight(file, weight, reader[owner])
                    progress(file.tell() - start or entry["bytes"])
    for rank, known in zip(ranks, entries, strict=True):
        plan = make_plan(rank.networks, rank.weights, known, rank.shard)
        out.json(plan_file(rank.shard.rank, rank.shard.size), plan)


def write_weight(file: ResumableFile, weight: Weight, checkpoint: WeightReader) -> dict[str, Any]:
    """Stream a weight, packed, to the file, unless that has it already; returns its plan entry.

    Raises:
        NetworkError: it asks for activations that the kernels do not have.
    """
    entry: dict[str, Any] | None = file.done.get(weight.name)
    if entry is None:
        entry = _write_weight(file, weight, checkpoint) | {"file": file.name}
        file.commit(weight.name, entry)
    return entry


def stored_bytes(plan: WeightPlan, owner: Owner) -> int:
    """What ``write_files`` will write of a rank's, padding aside."""
    return sum(_packed_bytes(w) for w in plan.stored.values() if w.owner == owner)


def make_plan(
    networks: Mapping[str, Network],
    weights: WeightPlan,
    entries: Mapping[str, dict[str, Any]],
    shard: Shard = WHOLE,
) -> dict[str, Any]:
    """The JSON-able plan of all networks over the packed weights ``entries``."""
    plan = _Plan(weights, entries)
    lowered = {name: _lower(network, plan) for name, network in networks.items()}
    return {
        "rank": shard.rank,
        "ranks": shard.size,
        "networks": lowered,
        "weights": list(plan.weights.values()),
        "states": list(plan.states.values()),
        "ropes": list(plan.ropes.values()),
        "routings": plan.routings,
    }


# Weights


def _write_weight(file: ResumableFile, weight: Weight, checkpoint: WeightReader) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": weight.name,
        "out_features": weight.num_rows // (weight.experts or 1),
        "in_features": 0 if len(weight.shape) == 1 else weight.shape[-1],
        "dtype": "float32",
        "global_scale": 0.0,
        "input_scale": 0.0,
        "experts": weight.experts,
        "expert_scales": [],
        "segments": [],
        "head_sizes": list(weight.head_sizes),
        "bias_offset": -1,
    }
    if len(weight.shape) == 1:
        values = read_vector(weight, checkpoint).float()
        return entry | {"kind": "vector"} | _append(file, values.numpy())
    if weight.experts:
        return entry | _write_experts(file, weight, checkpoint)
    if weight.head_sizes:
        return entry | _write_heads(file, weight, checkpoint)
    linear = checkpoint.stored_linear(weight.modules)
    if linear.global_scale is not None:
        entry |= {"kind": "nvfp4", "global_scale": linear.global_scale}
        entry["input_scale"] = _input_scale(weight, linear.input_scale)
    else:
        entry |= {"kind": "dense", "dtype": weight.dtype}
    entry |= append_linear(file, linear, weight.modules, checkpoint)
    if linear.bias is not None:
        entry["bias_offset"] = _append(file, linear.bias.float().numpy())["offset"]
    bounds = linear.segment_bounds or segment_bounds(-(-weight.shape[1] // BLOCK))
    return entry | {"segments": list(bounds)}


def _write_experts(file: ResumableFile, weight: Weight, checkpoint: WeightReader) -> dict[str, Any]:
    """One expert in memory at a time; their packed weights follow one another."""
    bounds: Sequence[int] = segment_bounds(-(-weight.shape[-1] // BLOCK))
    scales, input_scales, places = [], [], []
    for expert in range(weight.experts):
        modules = weight.modules_of(expert)
        linear = checkpoint.stored_linear(modules)
        bounds = linear.segment_bounds or bounds
        if linear.global_scale is not None:
            scales.append(linear.global_scale)
            input_scales.append(_input_scale(weight, linear.input_scale))
        places.append(append_linear(file, linear, modules, checkpoint))
    entry = {
        "offset": places[0]["offset"],
        "bytes": sum(place["bytes"] for place in places),
        "segments": list(bounds),
    }
    if scales:
        kind = {"kind": "nvfp4", "expert_scales": scales, "input_scale": max(input_scales)}
        return entry | kind
    return entry | {"kind": "dense", "dtype": weight.dtype}


def _write_heads(file: ResumableFile, weight: Weight, checkpoint: WeightReader) -> dict[str, Any]:
    """Of every head its keys' matrix, transposed, then its values'."""
    linear = read_linear(weight, weight.modules, checkpoint)
    assert isinstance(linear.weight, torch.Tensor)  # it is stored dense
    keys, values = weight.head_sizes
    places = []
    for head in torch.split(linear.weight, keys + values):
        for matrix in (head[:keys].T.contiguous(), head[keys:].contiguous()):
            places.append(append_rows(file, dense_cpu.DenseRows([matrix])))
    entry = {"offset": places[0]["offset"], "bytes": sum(place["bytes"] for place in places)}
    return entry | {"kind": "dense", "dtype": weight.dtype}


def _input_scale(weight: Weight, stored: torch.Tensor | None) -> float:
    if weight.activations == "bf16":
        return 0.0
    if weight.activations != "nvfp4" or stored is None:
        raise NetworkError(
            f"{weight.modules[0]}: the cpu backend has no {weight.activations} activations for "
            "NVFP4 weights; use --activations nvfp4 or bf16, or --backend reference"
        )
    return float(stored)


def _append(file: ResumableFile, data: np.ndarray[Any, Any]) -> dict[str, int]:
    align(file)
    offset = file.tell()
    file.write(np.ascontiguousarray(data).data)
    return {"offset": offset, "bytes": data.nbytes}


def _packed_bytes(weight: Weight) -> int:
    if len(weight.shape) == 1:
        return 4 * weight.shape[0]
    bias = 4 * weight.shape[0] if weight.has_bias else 0
    rows, k = weight.shape[-2:]
    if weight.head_sizes:
        keys, values = weight.head_sizes
        dtype = getattr(torch, weight.dtype)
        head = dense_cpu.packed_size(k, keys, dtype) + dense_cpu.packed_size(values, k, dtype)
        return head * (rows // (keys + values))
    if weight.kind == "nvfp4":
        one = nvfp4_cpu.packed_size(rows, k)
    else:
        one = dense_cpu.packed_size(rows, k, getattr(torch, weight.dtype))
    return bias + one * (weight.experts or 1)


# Networks


@dataclass
class _Plan:
    """Numbers the weights, states and RoPE tables that networks share."""

    source: WeightPlan
    entries: Mapping[str, dict[str, Any]]
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    ropes: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    routings: list[dict[str, Any]] = field(default_factory=list)

    def weight(self, name: str) -> int:
        if name not in self.weights:
            self.weights[name] = _view_entry(
                name, self.source.views[name], self.source.stored, self.entries
            )
        return list(self.weights).index(name)

    def state(self, network: Network, name: str) -> int:
        state = network.states[name]
        self.states.setdefault(
            name,
            {
                "kind": state.kind,
                "dtype": state.dtype,
                "k_scale": state.k_scale,
                "v_scale": state.v_scale,
                "heads": state.heads,
                "head_dim": state.head_dim,
                "value_dim": state.value_dim,
                "drafter": network.name != "target",
            },
        )
        return list(self.states).index(name)

    def rope(self, network: Network, op: Op) -> int:
        table = {
            "inv_freq": network.constants[op.attrs["inv_freq"]],
            "scaling": op.attrs["scaling"],
            "interleaved": op.attrs["interleaved"],
        }
        key = (*table["inv_freq"], table["scaling"], table["interleaved"])
        self.ropes.setdefault(key, table)
        return list(self.ropes).index(key)

    def routing(self, op: Op) -> int:
        table = {**op.attrs, "sigmoid": op.attrs["scores"] == "sigmoid"}
        del table["scores"]
        if table not in self.routings:
            self.routings.append(table)
        return self.routings.index(table)


def _view_entry(
    name: str, view: View, stored: Mapping[str, Weight], entries: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """The plan entry of a weight that is rows of a stored one: whole tiles of its bytes."""
    outer = entries[view.stored]
    rows = stored[view.stored].num_rows
    if view.num_rows == rows:
        return {**outer, "name": name}
    end = view.first_row + view.num_rows
    if view.first_row % TILE or (end % TILE and end != rows):
        raise NetworkError(
            f"{name}: rows {view.first_row} to {end} of {view.stored} do not begin and end on a "
            f"tile of {TILE}"
        )
    tile_bytes = outer["bytes"] // -(-rows // TILE)
    entry = {**outer, "name": name, "out_features": view.num_rows}
    entry["offset"] += view.first_row // TILE * tile_bytes
    entry["bytes"] = -(-view.num_rows // TILE) * tile_bytes
    if outer["bias_offset"] >= 0:
        entry["bias_offset"] += 4 * view.first_row
    return entry


@dataclass(frozen=True)
class _Place:
    """Columns ``offset`` to ``offset + width`` of a base tensor of ``stride`` columns."""

    base: str
    offset: int
    width: int
    stride: int


def _lower(network: Network, plan: _Plan) -> dict[str, Any]:
    places = _places(network)
    kept = [op for op in network.ops if not _is_view(network, op)]
    buffers, assigned = _assign_buffers(network, kept, places)
    names = list(places)
    ops = [_lower_op(network, op, plan, names) for op in kept]

    def index(name: str | None) -> int:
        return names.index(name) if name in places else -1

    return {
        "buffers": buffers,
        "tensors": [
            {
                "buffer": assigned[place.base],
                "offset": place.offset,
                "width": place.width,
                "stride": place.stride,
            }
            for place in places.values()
        ],
        "ops": ops,
        "captured_input": index("captured" if "captured" in network.inputs else None),
        "captured_output": index(network.outputs.get("captured")),
        "logits": index(network.outputs.get("logits")),
    }


def _is_view(network: Network, op: Op) -> bool:
    """Whether an op's results are parts of, or the same memory as, its input.

    Parts of every head are copied: a plan's tensor is one run of columns.
    """
    in_heads = len(network.tensors[op.inputs[0]].shape) == 3
    return op.kind == "reshape" or (op.kind == "split" and not in_heads)


def _places(network: Network) -> dict[str, _Place]:
    """Where each float tensor lies; integer tensors are not in buffers."""
    places: dict[str, _Place] = {}
    for name in network.inputs:
        if network.tensors[name].dtype != "int32":
            width = _width(network, name)
            places[name] = _Place(name, 0, width, width)
    for op in network.ops:
        if _is_view(network, op):
            outer, column = places[op.inputs[0]], 0
            for name in op.outputs:
                width = _width(network, name)
                places[name] = _Place(outer.base, outer.offset + column, width, outer.stride)
                column += width
        elif op.kind not in ("argmax", "top_k_log_probs"):  # those end outside of buffers
            for name in op.outputs:
                width = _width(network, name)
                places[name] = _Place(name, 0, width, width)
    return places


def _width(network: Network, name: str) -> int:
    width = 1
    for dim in network.tensors[name].shape[1:]:
        width *= int(dim)
    return width


def _assign_buffers(
    network: Network, ops: list[Op], places: Mapping[str, _Place]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Give each base tensor a buffer; a buffer is free again after its tensor's last use."""
    last_use: dict[str, int] = {}
    for step, op in enumerate(ops):
        for name in (*op.inputs, *op.outputs):
            if name in places:
                last_use[places[name].base] = step
    for name in network.outputs.values():
        if name in places:
            last_use[places[name].base] = len(ops)  # read after the run
    buffers: list[dict[str, Any]] = []
    assigned: dict[str, int] = {}

    def take(base: str, step: int) -> None:
        per_output = network.tensors[base].shape[0] == "outputs"
        width = places[base].stride
        busy = {assigned[b] for b in assigned if last_use.get(b, -1) >= step}
        free = [
            index
            for index, buffer in enumerate(buffers)
            if index not in busy and buffer["per_output"] == per_output
        ]
        # Of its own width if there is one: ops over equal rows can run together, row by row.
        index = min(free, key=lambda i: buffers[i]["width"] != width, default=len(buffers))
        if not free:
            buffers.append({"width": 0, "per_output": per_output})
        buffers[index]["width"] = max(buffers[index]["width"], width)
        assigned[base] = index

    for name in network.inputs:
        if name in places:
            take(name, 0)
    for step, op in enumerate(ops):
        for name in op.outputs:
            if name in places:
                take(name, step)
    return buffers, assigned


def _lower_op(network: Network, op: Op, plan: _Plan, names: list[str]) -> dict[str, Any]:
    lowered: dict[str, Any] = {
        "kind": "split_heads" if op.kind == "split" else op.kind,
        "name": op.name,
        "inputs": [names.index(name) for name in op.inputs if name in names],
        "outputs": [names.index(name) for name in op.outputs if name in names],
        "weight": -1,
        "state": -1,
        "rope": -1,
        "routing": -1,
        "heads": 1,
        "scale": 1.0,
        "eps": 0.0,
        "window": 0,
        "causal_mask": False,
        "row_parallel": op.attrs.get("row_parallel", False),
        "rank_columns": op.attrs.get("columns", []),
    }
    if op.weights:
        lowered["weight"] = plan.weight(op.weights[0])
    if op.state:
        lowered["state"] = plan.state(network, op.state)
    shape = network.tensors[op.inputs[0]].shape
    if len(shape) == 3:  # [rows, heads, head_dim]
        lowered["heads"] = int(shape[1])
    if op.kind in ("rms_norm", "layer_norm"):
        lowered["eps"] = op.attrs["eps"]
    elif op.kind == "head_linear":
        lowered["kind"] = {"key": "head_keys", "value": "head_values"}[op.attrs["part"]]
    elif op.kind == "route":
        lowered["routing"] = plan.routing(op)
    elif op.kind in ("experts_linear", "experts_scale", "experts_up"):
        lowered["heads"] = op.attrs["slots"]
    elif op.kind == "gated_delta_net":
        lowered["heads"] = int(network.tensors[op.inputs[1]].shape[1])  # the keys'
    elif op.kind == "rotary_embedding":
        lowered["rope"] = plan.rope(network, op)
    elif op.kind == "tree_attention":
        _check_size(op.name, "head_dim", int(shape[2]))
        lowered["scale"] = op.attrs["scale"]
        lowered["window"] = op.attrs["window"] or 0
        lowered["causal_mask"] = op.inputs[1] == "causal_mask"
    elif op.kind == "index_select":
        _check_size(op.name, "index_head_dim", int(shape[2]))
    elif op.kind == "latent_attention":
        _check_size(op.name, "kv_lora_rank + qk_rope_head_dim", int(shape[2]))
        _check_size(op.name, "kv_lora_rank", op.attrs["value_dim"])
        lowered["scale"] = op.attrs["scale"]
    return lowered


def _check_size(name: str, what: str, size: int) -> None:
    if size % TILE:
        raise NetworkError(
            f"{name}: {what} {size} is not a multiple of {TILE}, which the cpu backend "
            "needs; use --backend reference"
        )
