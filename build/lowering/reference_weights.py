"""Weights of the reference lowering: fused, otherwise as the checkpoint stores them.

One safetensors file per owner. A dense weight W is ``W.weight``; an NVFP4 one is
``W.codes``, ``W.block_scale``, ``W.global_scale`` and, where activations are
quantized, ``W.input_scale``; either may have ``W.bias``. The weights of a layer's experts
are stacked along a first axis; each keeps its ``global_scale``, and all share the largest
``input_scale``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from trtree.build.engine_dir import EngineDirWriter, weights_file
from trtree.build.lowering.reference import LinearImpl, ReferenceNetwork
from trtree.build.lowering.shard import RankNetworks
from trtree.build.lowering.weights import (
    View,
    WeightPlan,
    WeightReader,
    plan_weights,
    read_linear,
    read_vector,
)
from trtree.build.network.network import Network, NetworkError, Owner, Weight
from trtree.build.tensor_file import TensorFileWriter, TensorSpec
from trtree.plugins.dense_linear.reference import PreparedDense
from trtree.plugins.nvfp4_linear.format import BLOCK, QuantizedTensor
from trtree.plugins.nvfp4_linear.reference import PreparedLinear

SUFFIX = "safetensors"


def write_files(
    out: EngineDirWriter,
    ranks: Sequence[RankNetworks],
    checkpoints: Mapping[Owner, WeightReader],
    progress: Callable[[int], None],
) -> None:
    """Write every owner's weights of each rank; the networks are stored as they are."""
    for rank in ranks:
        for owner, checkpoint in rank.readers(checkpoints).items():
            path = out.path / weights_file(owner, rank.shard.rank, SUFFIX)
            write_weights(path, owner, rank.weights, checkpoint, progress)


def write_weights(
    path: Path,
    owner: Owner,
    plan: WeightPlan,
    checkpoint: WeightReader,
    progress: Callable[[int], None],
) -> None:
    """Stream the owner's stored weights from its checkpoint to one file.

    ``progress`` is told the bytes written after each weight.
    """
    weights = [weight for weight in plan.stored.values() if weight.owner == owner]
    specs = {name: spec for weight in weights for name, spec in _specs(weight).items()}
    with TensorFileWriter(path, specs) as writer:
        for weight in weights:
            for name, tensor in read_weight(weight, checkpoint).items():
                writer.write(name, tensor)
            progress(sum(spec.nbytes for spec in _specs(weight).values()))


def stored_bytes(plan: WeightPlan, owner: Owner) -> int:
    """What ``write_weights`` will write, headers aside."""
    return sum(
        spec.nbytes
        for weight in plan.stored.values()
        if weight.owner == owner
        for spec in _specs(weight).values()
    )


def load_networks(
    networks: Mapping[str, Network], files: Mapping[Owner, Path]
) -> dict[str, ReferenceNetwork]:
    """Networks with their weights read from the owners' files, each weight once."""
    plan = plan_weights(networks.values())
    stored = {
        owner: _load(path, [w for w in plan.stored.values() if w.owner == owner])
        for owner, path in files.items()
    }
    linears: dict[str, LinearImpl] = {}
    experts: dict[str, list[LinearImpl]] = {}
    loaded = {}
    for name, network in networks.items():
        dense = {}
        for op in network.ops:
            for weight in (network.weights[w] for w in op.weights):
                tensors = _view(stored[weight.owner], plan.views[weight.name])
                if weight.experts:
                    experts[weight.name] = [
                        _linear(weight, _of_expert(tensors, i)) for i in range(weight.experts)
                    ]
                elif op.kind != "linear":
                    dense[weight.name] = tensors["weight"]
                elif weight.name not in linears:
                    linears[weight.name] = _linear(weight, tensors)
        loaded[name] = ReferenceNetwork(network, dense, linears, experts)
    return loaded


def _specs(weight: Weight) -> dict[str, TensorSpec]:
    if weight.kind == "nvfp4":
        *rows, k = weight.shape
        specs = {
            "codes": TensorSpec((*rows, k // 2), torch.uint8),
            "block_scale": TensorSpec((*rows, k // BLOCK), torch.float8_e4m3fn),
            "global_scale": TensorSpec(weight.shape[:-2], torch.float32),
        }
        if weight.activations == "nvfp4":
            specs["input_scale"] = TensorSpec((), torch.float32)
    else:
        specs = {"weight": TensorSpec(weight.shape, getattr(torch, weight.dtype))}
    if weight.has_bias:
        specs["bias"] = TensorSpec(weight.shape[:1], torch.float32)
    return {f"{weight.name}.{part}": spec for part, spec in specs.items()}


def read_weight(weight: Weight, checkpoint: WeightReader) -> dict[str, torch.Tensor]:
    """What is stored of one weight, by the name it is stored under."""
    if len(weight.shape) == 1:
        return {f"{weight.name}.weight": read_vector(weight, checkpoint)}
    if weight.experts:
        parts = _read_experts(weight, checkpoint)
    else:
        parts = _read_linear(weight, weight.modules, checkpoint)
    return {f"{weight.name}.{part}": tensor for part, tensor in parts.items()}


def _read_experts(weight: Weight, checkpoint: WeightReader) -> dict[str, torch.Tensor]:
    """All experts' parts, stacked; one expert's are in memory beside them."""
    stacks: dict[str, torch.Tensor] = {}
    for expert in range(weight.experts):
        for part, tensor in _read_linear(weight, weight.modules_of(expert), checkpoint).items():
            if part not in stacks:
                stacks[part] = torch.empty((weight.experts, *tensor.shape), dtype=tensor.dtype)
            stacks[part][expert] = tensor
    if "input_scale" in stacks:
        stacks["input_scale"] = stacks["input_scale"].amax()
    return stacks


def _read_linear(
    weight: Weight, modules: Sequence[str], checkpoint: WeightReader
) -> dict[str, torch.Tensor]:
    linear = read_linear(weight, modules, checkpoint)
    parts: dict[str, torch.Tensor] = {}
    if isinstance(linear.weight, QuantizedTensor):
        parts["codes"], parts["block_scale"], parts["global_scale"] = linear.weight
        parts["global_scale"] = parts["global_scale"].reshape(()).float()
        if weight.activations == "nvfp4":
            if linear.input_scale is None:
                raise NetworkError(f"{modules[0]}: NVFP4 activations need an input_scale")
            parts["input_scale"] = linear.input_scale.reshape(())
    else:
        parts["weight"] = linear.weight
    if linear.bias is not None:
        parts["bias"] = linear.bias.float()
    return parts


def _load(path: Path, weights: list[Weight]) -> dict[str, dict[str, torch.Tensor]]:
    with safe_open(str(path), framework="pt") as file:
        return {
            weight.name: {
                name.removeprefix(f"{weight.name}."): file.get_tensor(name)
                for name in _specs(weight)
            }
            for weight in weights
        }


def _view(stored: Mapping[str, dict[str, torch.Tensor]], view: View) -> dict[str, torch.Tensor]:
    rows = slice(view.first_row, view.first_row + view.num_rows)
    return {
        part: tensor[rows] if tensor.ndim else tensor
        for part, tensor in stored[view.stored].items()
    }


def _of_expert(tensors: Mapping[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
    return {
        part: tensor if part == "input_scale" else tensor[expert]
        for part, tensor in tensors.items()
    }


def _linear(weight: Weight, tensors: Mapping[str, torch.Tensor]) -> LinearImpl:
    bias = tensors.get("bias")
    if weight.activations is None:
        return PreparedDense(tensors["weight"], bias)
    quantized = QuantizedTensor(tensors["codes"], tensors["block_scale"], tensors["global_scale"])
    return PreparedLinear(quantized, tensors.get("input_scale"), weight.activations, bias)
