"""Embed a small pair in a network with a larger model's GEMM shapes, bit for bit.

Hidden states are padded with zeros (to r times the size, r a power of four), heads and
feed-forward units are added with zero weights, and layers whose residual branches are
zero follow the original ones. What the widened network computes is what the small one
does, to the last bit, because

- a norm over r times as many elements has a mean square of 1/r: with eps / r and its
  weights times 1 / sqrt(r), a power of two, the result is exact;
- head size and group size stay, so attention and RoPE see the same numbers;
- each linear keeps the K segments of the original, and zero columns add nothing.

The vocabulary is unchanged. The result is a benchmark: a step that is bound by memory
as a real model's is, with a real pair's acceptance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtree.build.checkpoint import Checkpoint, LinearWeight, QuantizationConfig, StoredLinear
from trtree.build.network.graph import WeightInfo
from trtree.build.network.network import Owner
from trtree.build.options import OptionError
from trtree.build.source import CheckpointSource
from trtree.plugins.nvfp4_linear.format import BLOCK, QuantizedTensor

SEGMENTS = 8


@dataclass(frozen=True)
class Shape:
    """What the GEMMs of a model are made of; q_size and kv_size are heads * head size."""

    hidden: int
    q_size: int
    kv_size: int
    ffn: int
    layers: int


SHAPES = {
    "qwen3-0.6b": Shape(hidden=1024, q_size=2048, kv_size=1024, ffn=3072, layers=28),
    "qwen3-1.7b": Shape(hidden=2048, q_size=2048, kv_size=1024, ffn=6144, layers=28),
}


@dataclass(frozen=True)
class _Widening:
    """How the weights of one owner grow."""

    config: Mapping[str, Any]
    shape: Shape

    @property
    def ratio(self) -> int:
        return self.shape.hidden // int(self.config["hidden_size"])

    @property
    def head_dim(self) -> int:
        return int(self.config["head_dim"])

    def check(self) -> None:
        """Refuse a shape that cannot hold this model exactly."""
        root = math.isqrt(self.ratio)
        sizes = {
            "hidden_size": (self.config["hidden_size"], self.shape.hidden),
            "q heads * head_dim": (self._q_size, self.shape.q_size),
            "kv heads * head_dim": (self._kv_size, self.shape.kv_size),
            "intermediate_size": (self.config["intermediate_size"], self.shape.ffn),
        }
        for what, (small, large) in sizes.items():
            if small > large:
                raise OptionError(f"cannot widen: {what} is {large}, the pair's is {small}")
        if root * root != self.ratio or root & (root - 1):
            raise OptionError(
                f"cannot widen: hidden size {self.shape.hidden} is {self.ratio} times the "
                f"pair's {self.config['hidden_size']}; only powers of four are exact"
            )
        if self._q_size * self.shape.kv_size != self._kv_size * self.shape.q_size:
            raise OptionError(
                f"cannot widen: {self.shape.q_size // self.shape.kv_size} query heads share a "
                f"KV head, in the pair {self._q_size // self._kv_size}; they must agree"
            )

    def widened_config(self, layers: int) -> dict[str, Any]:
        eps = float(self.config["rms_norm_eps"])
        return {
            **self.config,
            "hidden_size": self.shape.hidden,
            "num_attention_heads": self.shape.q_size // self.head_dim,
            "num_key_value_heads": self.shape.kv_size // self.head_dim,
            "intermediate_size": self.shape.ffn,
            "num_hidden_layers": layers,
            "layer_types": None,
            "rms_norm_eps": eps / self.ratio,
            "qk_norm_eps": eps,
        }

    def out_features(self, module: str, small: int) -> int:
        sizes = {
            "q_proj": self.shape.q_size,
            "k_proj": self.shape.kv_size,
            "v_proj": self.shape.kv_size,
            "gate_proj": self.shape.ffn,
            "up_proj": self.shape.ffn,
            "o_proj": self.shape.hidden,
            "down_proj": self.shape.hidden,
            "fc": self.shape.hidden,
        }
        return sizes.get(module.rpartition(".")[2], small)

    def in_groups(self, module: str, small: int) -> tuple[int, int, int]:
        """(groups, small, large): K is ``groups`` runs that each grow from small to large."""
        kind = module.rpartition(".")[2]
        if kind == "o_proj":
            return 1, small, self.shape.q_size
        if kind == "down_proj":
            return 1, small, self.shape.ffn
        hidden = int(self.config["hidden_size"])
        return small // hidden, hidden, self.shape.hidden

    @property
    def _q_size(self) -> int:
        return int(self.config["num_attention_heads"]) * self.head_dim

    @property
    def _kv_size(self) -> int:
        return int(self.config["num_key_value_heads"]) * self.head_dim


class WidenedCheckpoint:
    """Reads like a Checkpoint, with every tensor widened and identity layers added."""

    def __init__(self, checkpoint: Checkpoint, widening: _Widening, layers: int) -> None:
        self._small = checkpoint
        self._widening = widening
        self._small_layers = int(checkpoint.config["num_hidden_layers"])
        self.config = widening.widened_config(layers)

    def describe(self, module: str, source: CheckpointSource, owner: Owner) -> WeightInfo:
        small = source.describe(self._original(module), owner, ())
        if small.pre_quant_scale or small.low_rank:
            raise OptionError(
                f"cannot widen: {module} scales its input, or has factors (NVFP4_AWQ, NVFP4_SVD)"
            )
        if len(small.shape) == 1:
            return replace(small, shape=self._vector_shape(module, small.shape[0]))
        groups, _, large = self._widening.in_groups(module, small.shape[1])
        out = self._widening.out_features(module, small.shape[0])
        return replace(small, shape=(out, groups * large))

    def tensor(self, name: str) -> torch.Tensor:
        """A norm's vector: weights times 1 / sqrt(ratio) where hidden states are normed."""
        module, _, part = name.rpartition(".")
        small = self._small.tensor(f"{self._original(module)}.{part}")
        (large,) = self._vector_shape(module, small.shape[0])
        if large == small.shape[0]:
            return small
        wide = torch.zeros(large, dtype=small.dtype)
        wide[: len(small)] = small / math.isqrt(self._widening.ratio)
        return wide

    def linear(self, modules: Sequence[str]) -> LinearWeight:
        """The fused linear with zero rows after each module's and zero columns after each run."""
        small = self._small.linear([self._original(module) for module in modules])
        sizes = [self._small.linear_info(self._original(m)).out_features for m in modules]
        outs = [self._widening.out_features(m, s) for m, s in zip(modules, sizes, strict=True)]
        silent = any(self._is_silent(module) for module in modules)
        in_features = self._small.linear_info(self._original(modules[0])).in_features
        groups = self._widening.in_groups(modules[0], in_features)

        def widen(tensor: torch.Tensor, per: int) -> torch.Tensor:
            """``per``: elements of K that one column of the tensor stands for."""
            return _pad(0 * tensor if silent else tensor, sizes, outs, groups, per)

        weight: QuantizedTensor | torch.Tensor
        if isinstance(small.weight, QuantizedTensor):
            codes, scales, global_scale = small.weight
            scale_bytes = _pad(scales.view(torch.uint8), sizes, outs, groups, BLOCK)
            weight = QuantizedTensor(
                widen(codes, 2), scale_bytes.view(torch.float8_e4m3fn), global_scale
            )
        else:
            weight = widen(small.weight, 1)
        bias = None if small.bias is None else _pad_rows(small.bias, sizes, outs)
        return replace(small, weight=weight, bias=bias, segment_bounds=_bounds(in_features, groups))

    def stored_linear(self, modules: Sequence[str]) -> StoredLinear:
        """``linear``, to be packed."""
        return StoredLinear.of(self.linear(modules))

    def _vector_shape(self, module: str, small: int) -> tuple[int]:
        return (small if module.endswith(("q_norm", "k_norm")) else self._widening.shape.hidden,)

    def _layer(self, module: str) -> int | None:
        parts = module.split(".")
        return int(parts[parts.index("layers") + 1]) if "layers" in parts else None

    def _is_silent(self, module: str) -> bool:
        """Whether this is what an added layer writes to the residual stream: nothing."""
        layer = self._layer(module)
        added = layer is not None and layer >= self._small_layers
        return added and module.endswith(("o_proj", "down_proj"))

    def _original(self, module: str) -> str:
        """The module whose weights stand in; added layers repeat the original ones."""
        layer = self._layer(module)
        if layer is None or layer < self._small_layers:
            return module
        return module.replace(f"layers.{layer}.", f"layers.{layer % self._small_layers}.")


class WidenedSource:
    """The weight source of a widened pair; stands where a CheckpointSource does."""

    def __init__(self, source: CheckpointSource, shape: Shape) -> None:
        self._source = source
        self._wide: dict[Owner, WidenedCheckpoint] = {}
        owners: tuple[Owner, ...] = ("target", "drafter")
        for owner in owners:
            checkpoint = source.checkpoint(owner)
            widening = _Widening(checkpoint.config, shape)
            widening.check()
            own = int(checkpoint.config["num_hidden_layers"])
            layers = max(shape.layers, own) if owner == "target" else own
            self._wide[owner] = WidenedCheckpoint(checkpoint, widening, layers)

    def checkpoint(self, owner: Owner) -> WidenedCheckpoint:
        return self._wide[owner]

    def config(self, owner: Owner) -> Mapping[str, Any]:
        return self._wide[owner].config

    def quantization(self, owner: Owner) -> QuantizationConfig | None:
        return self._source.quantization(owner)

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        return self._wide[owner].describe(module, self._source, owner)


def _pad_rows(tensor: torch.Tensor, sizes: Sequence[int], outs: Sequence[int]) -> torch.Tensor:
    parts = []
    for part, out in zip(torch.split(tensor, list(sizes)), outs, strict=True):
        wide = torch.zeros((out, *part.shape[1:]), dtype=part.dtype)
        wide[: len(part)] = part
        parts.append(wide)
    return torch.cat(parts)


def _pad(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    outs: Sequence[int],
    groups: tuple[int, int, int],
    per: int,
) -> torch.Tensor:
    """Zero rows behind each module's, zero columns behind each run of K."""
    count, small, large = groups
    rows = _pad_rows(tensor, sizes, outs)
    wide = torch.zeros((len(rows), count, large // per), dtype=tensor.dtype)
    wide[:, :, : small // per] = rows.reshape(len(rows), count, small // per)
    return wide.reshape(len(rows), -1)


def _bounds(in_features: int, groups: tuple[int, int, int]) -> tuple[int, ...]:
    """The original segments' bounds, in blocks, where their blocks stand now."""
    count, small, large = (groups[0], groups[1] // BLOCK, groups[2] // BLOCK)
    blocks = in_features // BLOCK
    bounds = [i * blocks // SEGMENTS for i in range(SEGMENTS)]
    return (*(b // small * large + b % small for b in bounds), count * large)
