"""A network in the vocabulary -> INetworkDefinition, by one table from op to layers.

The ragged rows become a padded batch: ``[rows, F]`` is ``[B, W, F]``, ``[rows, heads, D]``
is ``[B, heads, W, D]``, ``[rows, slots, F]`` of experts is ``[experts, B * W, F]`` and
``[outputs, F]`` is ``[B, O, F]``. A batch index is a cache slot; row w of a request is
written at its committed length plus w. With plugin attention (paged.py) rows stay ragged,
and B is 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trtree.build.lowering.tensorrt import branch, paged_branch, paged_latent
from trtree.build.lowering.tensorrt import paged as paged_attention
from trtree.build.lowering.tensorrt.context import (
    BATCH,
    OUTPUT_PREFIX,
    OUTPUTS,
    ROWS,
    Binding,
    Lowering,
)
from trtree.build.lowering.tensorrt.emitter import Emitter
from trtree.build.lowering.tensorrt.ops import OPS, SHARDABLE
from trtree.build.lowering.tensorrt.paged import PagedLowering, Untensored
from trtree.build.lowering.tensorrt.paged_sizes import StepPlan
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.network import Network, NetworkError, State

# Graph inputs that a padded, contiguous layout says differently.
_RESHAPED_INPUTS = {
    "slots": Binding("committed_lengths", "int32", (BATCH,)),
    "packed_mask": Binding("tree_mask", "bool", (BATCH, ROWS, ROWS)),
    "causal_mask": Binding("causal_mask", "bool", (BATCH, ROWS, ROWS)),
}


@dataclass
class LoweredNetwork:
    """A finished INetworkDefinition and what is needed to build, run or evaluate it.

    constants: by layer name, the memory that the network borrows. tensors: from a tensor
    of the graph to the network tensor that holds it, in the layout above. plans: the work
    items that a step of plugin attention brings. branches: by name, the kind of state that
    branches: an input that is only read, [slots, ...].
    """

    definition: Any
    inputs: list[Binding]
    outputs: list[Binding]
    constants: Mapping[str, torch.Tensor]
    tensors: Mapping[str, str]
    plans: Sequence[StepPlan] = ()
    branches: Mapping[str, str] = field(default_factory=dict)


def lower(
    trt: Any,
    builder: Any,
    network: Network,
    encoding: Encoding,
    weights: Mapping[str, torch.Tensor],
    cache_length: int,
    paged: PagedLowering | None = None,
    *,
    max_rows: int | None = None,
) -> LoweredNetwork:
    """Lower ``network`` for one rank.

    Args:
        trt: the library's module. builder: its Builder, which outlives the network.
        weights: what ``weights.stage`` returned for this network and encoding.
        cache_length: slots per request in the KV cache, static; positions where it is paged.
        paged: for plugin attention.
        max_rows: most rows of a request in one step; by default as many as a cache holds.

    Raises:
        NetworkError: an op has no lowering, or TensorRT refused a layer.
    """
    functions = OPS
    if paged:
        functions = OPS | paged_attention.OPS | paged_latent.OPS | paged_branch.OPS
    unknown = sorted({op.kind for op in network.ops} - set(functions))
    if unknown:
        raise NetworkError(f"{network.name}: the TensorRT lowering has no {unknown}")
    flags = 0
    if "STRONGLY_TYPED" in trt.NetworkDefinitionCreationFlag.__members__:
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    definition = builder.create_network(flags)
    definition.name = network.name
    emit, max_rows = Emitter(trt, definition), max_rows or cache_length
    low = Lowering(emit, network, encoding, weights, cache_length, max_rows, paged=paged)
    inputs = [_input(low, name) for name in network.inputs]
    inputs += _step_inputs(low)
    inputs += _cache_inputs(low)
    for op in network.ops:
        if op.kind not in SHARDABLE and not low.sharded.isdisjoint(op.inputs):
            raise NetworkError(f"{op.name}: an operand of {op.kind} is divided among ranks")
        operands = [low.values[name] for name in op.inputs]
        if op.kind not in paged_attention.TURNING and any(
            isinstance(operand, Untensored) for operand in operands
        ):
            raise NetworkError(f"{op.name}: plugin attention turns {op.inputs[0]} for itself alone")
        with low.emit.op(op.name):
            results = functions[op.kind](low, op, operands)
        for name, value in zip(op.outputs, results, strict=True):
            low.values[name] = value
    outputs = _outputs(low) + (paged_attention.step_outputs(low) if paged else [])
    tensors = {
        name: value.name for name, value in low.values.items() if not isinstance(value, Untensored)
    }
    plans = list(dict.fromkeys(paged.plans.values())) if paged else []
    branches = {name: network.states[name].kind for name in low.committed}
    return LoweredNetwork(definition, inputs, outputs, emit.constants, tensors, plans, branches)


def _input(low: Lowering, name: str) -> Binding:
    tensor = low.network.tensors[name]
    first = OUTPUTS if tensor.shape[0] == "outputs" else ROWS
    as_it_is = Binding(name, tensor.dtype, (low.batch, first, *tensor.shape[1:]))
    if low.paged:
        reshaped = paged_attention.reshaped_inputs(low)
    else:
        reshaped = {**_RESHAPED_INPUTS, branch.PARENTS: branch.parents_binding(low.network)}
    binding = reshaped.get(name, as_it_is)
    low.values[name] = _add_input(low, binding)
    return binding


def _step_inputs(low: Lowering) -> list[Binding]:
    if low.paged is None:
        return []
    bindings = paged_attention.step_inputs(low)
    low.paged.step |= {binding.name: _add_input(low, binding) for binding in bindings}
    return bindings


def _cache_inputs(low: Lowering) -> list[Binding]:
    bindings = []
    for state in low.network.states.values():
        own = low.encoding.shard.state(state)
        if not state.paged:
            slots = low.paged.sizes.max_requests if low.paged else BATCH
            bindings.append(Binding(state.name, state.dtype, (slots, *own.shape)))
            low.committed[state.name] = _add_input(low, bindings[-1])
            continue
        dims: tuple[int | str, ...] = (BATCH, own.heads, low.cache_length, state.head_dim)
        if low.paged:
            sizes = low.paged.sizes
            heads = () if state.kind == "latent" else (own.heads,)
            dims = (sizes.num_pages, sizes.page_size, *heads, state.head_dim)
        parts = [Binding(f"{state.name}.{p}", state.dtype, dims) for p in cache_parts(state)]
        low.caches[state.name] = tuple(_add_input(low, part) for part in parts)
        bindings += parts
    return bindings


def cache_parts(state: State) -> tuple[str, ...]:
    """The tensors that hold a paged state, by the ends of their names."""
    return ("latent",) if state.kind == "latent" else ("k", "v")


def _add_input(low: Lowering, binding: Binding) -> Any:
    shape = [-1 if isinstance(dim, str) else dim for dim in binding.dims]
    dtype = getattr(low.emit.trt, {"float8_e4m3fn": "fp8"}.get(binding.dtype, binding.dtype))
    tensor = low.emit.network.add_input(binding.name, dtype, shape)
    for axis, dim in enumerate(binding.dims):
        if isinstance(dim, str):
            tensor.set_dimension_name(axis, dim)
    return tensor


def _outputs(low: Lowering) -> list[Binding]:
    bindings = []
    for role, name in low.network.outputs.items():
        tensor = low.network.tensors[name]
        first = OUTPUTS if tensor.shape[0] == "outputs" else ROWS
        features = [low.extent(name), *tensor.shape[2:]] if len(tensor.shape) > 1 else []
        binding = Binding(OUTPUT_PREFIX + role, tensor.dtype, (low.batch, first, *features))
        low.values[name].name = binding.name
        low.emit.network.mark_output(low.values[name])
        bindings.append(binding)
    for state, caches in low.caches.items():
        for part, cache in zip(cache_parts(low.network.states[state]), caches, strict=True):
            source = f"{state}.{part}"
            cache.name = OUTPUT_PREFIX + source
            low.emit.network.mark_output(cache)
            dims = tuple(cache.shape) if low.paged else (BATCH, *cache.shape[1:])
            bindings.append(Binding(cache.name, low.network.states[state].dtype, dims, source))
    for name, kept in low.kept.items():
        kept.name = OUTPUT_PREFIX + name
        low.emit.network.mark_output(kept)
        whole = low.network.states[name.rpartition(".")[0]]
        bindings.append(_kept(low, low.encoding.shard.state(whole), kept))
    return bindings


def _kept(low: Lowering, state: State, kept: Any) -> Binding:
    """What rows leave to a commit: [B, W, C] of a convolution, else [B, heads, W, ...]; with
    plugins [rows, ...] of both."""
    if low.paged:
        return paged_branch.kept_binding(kept)
    if state.kind == "conv":
        return Binding(kept.name, state.dtype, (BATCH, ROWS, state.head_dim))
    sizes = [int(dim) for dim in kept.shape]
    return Binding(kept.name, "float32", (BATCH, sizes[1], ROWS, *sizes[3:]))
