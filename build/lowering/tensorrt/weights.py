"""One rank's weights of one network, as the constants that the layers take.

They are streamed to a staging file and mapped from there, so that a build's anonymous
memory holds TensorRT's own copies only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from trtree.build.lowering.reference import TORCH_DTYPES
from trtree.build.lowering.reference_weights import read_weight
from trtree.build.lowering.shard import WHOLE, Shard
from trtree.build.lowering.weights import WeightReader
from trtree.build.network.graph import Parallel
from trtree.build.network.network import Network, NetworkError, Op, Owner, Weight
from trtree.build.tensor_file import TensorFileWriter, TensorSpec
from trtree.plugins.nvfp4_linear import format as nvfp4


@dataclass(frozen=True)
class WeightUse:
    """A weight as one op uses it. A tied embedding has two uses: whole, and split as head.

    wide: dense weights in float32, for an op that computes in it.
    """

    weight: Weight
    parallel: Parallel | None
    wide: bool = False

    @property
    def prefix(self) -> str:
        """What the names of its constants start with."""
        return f"{self.weight.name}@{self.parallel}" if self.parallel else self.weight.name


@dataclass(frozen=True)
class Encoding:
    """How weights become constants.

    fp4: NVFP4 weights stay so; otherwise they are INT8 values of twice the magnitude
    with half the scale, which is exact, for SMs that have no FP4.
    """

    fp4: bool = True
    shard: Shard = WHOLE

    def use(self, weight: Weight, op: Op) -> WeightUse:
        """How ``op`` uses its weight; on one rank nothing is split."""
        parallel = op.attrs.get("parallel") if self.shard.size > 1 else None
        return WeightUse(weight, parallel, op.attrs.get("dtype") == "float32")

    def uses(self, network: Network) -> list[WeightUse]:
        """All distinct uses, in the order of the ops."""
        uses = [self.use(network.weights[name], op) for op in network.ops for name in op.weights]
        return list(dict.fromkeys(uses))

    def specs(self, use: WeightUse, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """This rank's constants, by part."""
        weight, shape = use.weight, self._local_shape(use)
        if len(shape) == 1:
            return {"weight": TensorSpec(shape, torch.float32)}
        *rows, k = shape
        specs = {}
        if weight.kind == "dense":
            specs["weight"] = TensorSpec(shape, torch.float32 if use.wide else dtype)
        elif self.fp4:
            specs["codes"] = TensorSpec((*rows, k // 2), torch.uint8)
            specs["block_scale"] = TensorSpec((*rows, k // nvfp4.BLOCK), torch.float8_e4m3fn)
            each = (weight.experts, 1, 1) if weight.experts else ()
            specs["global_scale"] = TensorSpec(each, torch.float32)
        else:
            specs["values"] = TensorSpec(shape, torch.int8)
            specs["scale"] = TensorSpec((*rows, k // nvfp4.BLOCK), torch.float32)
        if weight.activations == "nvfp4":
            specs["input_scale"] = TensorSpec((), torch.float32)
        if weight.has_bias:
            specs["bias"] = TensorSpec((1, 1, *rows), torch.float32)
        return specs

    def tensors(
        self, use: WeightUse, dtype: torch.dtype, checkpoint: WeightReader
    ) -> dict[str, torch.Tensor]:
        """The constants themselves, by part, as ``specs`` describes them."""
        weight = use.weight
        stored = read_weight(weight, checkpoint)
        parts = {
            name.removeprefix(f"{weight.name}."): self._local(use, tensor)
            for name, tensor in stored.items()
        }
        if weight.experts and weight.kind == "nvfp4":
            parts["global_scale"] = parts["global_scale"].reshape(-1, 1, 1)
        if len(weight.shape) == 1:
            parts["weight"] = parts["weight"].float()
        elif weight.kind == "dense":
            parts["weight"] = parts["weight"].to(torch.float32 if use.wide else dtype)
        elif not self.fp4:
            parts["scale"] = parts.pop("block_scale").float() * parts.pop("global_scale") / 2
            parts["values"] = (2 * nvfp4.e2m1_values(parts.pop("codes"))).to(torch.int8)
        if "bias" in parts:
            parts["bias"] = parts["bias"].reshape(1, 1, -1)
        return parts

    def _local_shape(self, use: WeightUse) -> tuple[int, ...]:
        weight, part = use.weight, self.shard.part
        if use.parallel == "column":
            rows = sum(part(n, weight.name) for n in _sizes(weight))
            if len(weight.shape) == 1:
                return (rows,)
            return (*weight.shape[:-2], rows, *weight.shape[-1:])
        if use.parallel == "row":
            k = part(weight.shape[-1], weight.name)
            if weight.kind == "nvfp4" and k % nvfp4.BLOCK:
                raise NetworkError(
                    f"{weight.name}: a rank's {k} of {weight.shape[-1]} columns are no whole "
                    f"NVFP4 blocks of {nvfp4.BLOCK}"
                )
            return (*weight.shape[:-1], k)
        return weight.shape

    def _local(self, use: WeightUse, tensor: torch.Tensor) -> torch.Tensor:
        name, stacked = use.weight.name, bool(use.weight.experts)
        if use.parallel == "column" and tensor.ndim > (1 if stacked else 0):
            modules = torch.split(tensor, _sizes(use.weight), dim=int(stacked))
            parts = [self.shard.of(module, int(stacked), name) for module in modules]
            return torch.cat(parts, dim=int(stacked))
        if use.parallel == "row" and tensor.ndim >= 2:
            return self.shard.of(tensor, tensor.ndim - 1, name)
        return tensor


def _sizes(weight: Weight) -> list[int]:
    """Out_features of each module of a linear, or of one expert's."""
    return list(weight.out_sizes[: len(weight.out_sizes) // (weight.experts or 1)])


def constant_bytes(network: Network, encoding: Encoding) -> int:
    """What one rank's engine holds of this network's weights."""
    return sum(spec.nbytes for spec in _specs(network, encoding).values())


def stage(
    path: Path,
    network: Network,
    encoding: Encoding,
    checkpoint_of: Callable[[Owner], WeightReader],
    progress: Callable[[int], None] = lambda _: None,
) -> Mapping[str, torch.Tensor]:
    """Write the constants to a new file, one weight in memory at a time, and map them.

    Names are the use's prefix and the part: ``target:lm_head.weight``.
    """
    dtype = TORCH_DTYPES[network.dtype]
    specs = _specs(network, encoding)
    with TensorFileWriter(path, specs) as writer:
        for use in encoding.uses(network):
            parts = encoding.tensors(use, dtype, checkpoint_of(use.weight.owner))
            for part in encoding.specs(use, dtype):
                writer.write(f"{use.prefix}.{part}", parts[part])
                progress(parts[part].nbytes)
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in specs}


def _specs(network: Network, encoding: Encoding) -> dict[str, TensorSpec]:
    dtype = TORCH_DTYPES[network.dtype]
    return {
        f"{use.prefix}.{part}": spec
        for use in encoding.uses(network)
        for part, spec in encoding.specs(use, dtype).items()
    }
