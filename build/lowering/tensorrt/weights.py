"""One rank's weights of one network, as the constants that the layers take.

They are streamed to a staging file and mapped from there, so that a build's anonymous
memory holds TensorRT's own copies only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from trtree.build.lowering.division import WHOLE, Division, Shard
from trtree.build.lowering.reference import TORCH_DTYPES
from trtree.build.lowering.reference_weights import read_weight
from trtree.build.lowering.weights import WeightReader
from trtree.build.network.graph import Parallel
from trtree.build.network.network import Network, Op, Owner, Weight
from trtree.build.tensor_file import TensorFileWriter, TensorSpec
from trtree.plugins.nvfp4_linear import format as nvfp4


@dataclass(frozen=True)
class WeightUse:
    """A weight as one op uses it. A tied embedding has two uses: whole, and split as head.

    wide: dense weights in float32, for an op that computes in it. rows, columns: this rank's,
    where it has a part; rows are one range per module.
    """

    weight: Weight
    parallel: Parallel | None
    wide: bool = False
    rows: tuple[range, ...] | None = None
    columns: range | None = None

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

    def use(self, division: Division, op: Op, name: str) -> WeightUse:
        """How ``op`` uses its weight ``name``; on one rank nothing is split.

        Raises:
            NetworkError: it does not divide among the ranks.
        """
        weight, wide = division.network.weights[name], op.attrs.get("dtype") == "float32"
        parallel: Parallel | None = op.attrs.get("parallel")
        if self.shard.size == 1 or parallel is None:
            return WeightUse(weight, None, wide)
        if parallel == "row":
            return WeightUse(weight, parallel, wide, columns=division.columns(weight))
        if division.uses[op.name] == "vocabulary":
            part = self.shard.part(weight.num_rows, f"{weight.name}: out_features")
            return WeightUse(weight, parallel, wide, rows=(part,))
        return WeightUse(weight, parallel, wide, rows=division.rows(weight))

    def uses(self, network: Network) -> list[WeightUse]:
        """All distinct uses, in the order of the ops."""
        division = Division(network, self.shard)
        uses = [self.use(division, op, name) for op in network.ops for name in op.weights]
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
        *stack, rows, k = shape if len(shape := use.weight.shape) > 1 else (*shape, 0)
        if use.rows is not None:
            rows = sum(map(len, use.rows))
        if use.columns is not None:
            k = len(use.columns)
        return (rows,) if len(shape) == 1 else (*stack, rows, k)

    def _local(self, use: WeightUse, tensor: torch.Tensor) -> torch.Tensor:
        stacked = int(bool(use.weight.experts))
        if use.rows is not None and tensor.ndim > stacked:
            parts = [tensor.narrow(stacked, part.start, len(part)) for part in use.rows]
            return torch.cat(parts, dim=stacked)
        if use.columns is not None and tensor.ndim >= 2:
            # Codes hold two columns each, block scales 16.
            share = use.weight.shape[-1] // tensor.shape[-1]
            part = use.columns
            return tensor.narrow(-1, part.start // share, len(part) // share)
        return tensor


def constant_bytes(network: Network, encoding: Encoding, owner: Owner | None = None) -> int:
    """What one rank's engine holds of this network's weights, or of one owner's among them."""
    return sum(spec.nbytes for spec in _specs(network, encoding, owner).values())


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


def _specs(
    network: Network, encoding: Encoding, owner: Owner | None = None
) -> dict[str, TensorSpec]:
    dtype = TORCH_DTYPES[network.dtype]
    return {
        f"{use.prefix}.{part}": spec
        for use in encoding.uses(network)
        if owner in (None, use.weight.owner)
        for part, spec in encoding.specs(use, dtype).items()
    }
