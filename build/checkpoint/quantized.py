"""A plain checkpoint that reads as if it were quantized: its linears are rounded on the way.

Weights only, to nearest, with max calibration: nothing is known of the activations, so
they stay bf16 (W4A16). Peak memory is the result and a few rows in float32.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from trtree.build.checkpoint import linear
from trtree.build.checkpoint.errors import CheckpointError
from trtree.build.checkpoint.headers import LinearInfo
from trtree.build.checkpoint.linear import LinearWeight, StoredLinear
from trtree.build.checkpoint.reader import Checkpoint
from trtree.build.checkpoint.scheme import QuantizationConfig
from trtree.build.checkpoint.shard import map_tensor
from trtree.plugins.dense_linear.cpu import DenseRows
from trtree.plugins.nvfp4_linear import format as nvfp4

# What ModelOpt leaves alone too: embeddings, heads, and the small linears that choose
# experts or feed a recurrence; and what is stored dense whatever it is, or chooses keys.
EXCLUDED = (
    "*embed_tokens",
    "*lm_head",
    "*.mlp.gate",
    "*router*",
    "*shared_expert_gate",
    "*.conv1d",
    "*.kv_b_proj",
    "*.indexer.weights_proj",
)
# By the builder, rather than by a file of the checkpoint.
CONFIG = QuantizationConfig("W4A16_NVFP4", EXCLUDED, source="the builder")
_CHUNK = 1 << 20  # elements rounded at a time


class QuantizedCheckpoint(Checkpoint):
    """``plain``, with every linear that ``EXCLUDED`` does not name as W4A16 NVFP4.

    Args:
        one_scale: one global scale for all linears, so that a linear is the same however
            it is fused; else each ``linear`` has its own, from its modules alone.

    Raises:
        CheckpointError: ``plain`` is quantized already; on reading, a linear whose
            in_features are no multiple of 16.
    """

    def __init__(self, plain: Checkpoint, *, one_scale: bool = False) -> None:
        check_plain(plain.directory, plain.quantization)
        super().__init__(
            plain.directory,
            plain.config,
            CONFIG,
            {name: plain.info(name) for name in plain.names()},
        )
        self._plain = plain
        self._one_scale = one_scale
        self._magnitudes: dict[str, float] = {}

    def linear_info(self, module: str) -> LinearInfo:
        """As ``Checkpoint.linear_info``, of the linear once quantized."""
        info = self._plain.linear_info(module)
        if CONFIG.is_excluded(module):
            return info
        if info.in_features % nvfp4.BLOCK:
            raise CheckpointError(
                f"{self.directory}: cannot quantize {module} to NVFP4: its in_features "
                f"{info.in_features} are no multiple of {nvfp4.BLOCK}"
            )
        return replace(info, kind="nvfp4", dtype=torch.uint8, algorithm=CONFIG.algorithm)

    def linear(self, modules: Sequence[str]) -> LinearWeight:
        """As ``Checkpoint.linear``; modules that are fused share one global scale."""
        linear.check_fusable(self, modules)
        if self.linear_info(modules[0]).kind == "dense":
            return self._plain.linear(modules)
        weights = [self.tensor(f"{module}.weight") for module in modules]
        return LinearWeight(
            "nvfp4",
            _quantize(weights, torch.tensor(self._scale(modules))),
            None,
            linear.load_bias(self, modules),
        )

    def stored_linear(self, modules: Sequence[str]) -> StoredLinear:
        """As ``Checkpoint.stored_linear``; what is to be quantized is read for its scale."""
        linear.check_fusable(self, modules)
        if self.linear_info(modules[0]).kind == "dense":
            return self._plain.stored_linear(modules)
        weights = tuple(self.stored(f"{module}.weight") for module in modules)
        bias = linear.load_bias(self, modules)
        return StoredLinear((), (), weights, self._scale(modules), None, bias)

    def _scale(self, modules: Sequence[str]) -> float:
        """The global scale of modules that are fused; each module is read once for it."""
        if self._one_scale:
            return _global_scale(self._magnitude(name) for name in self._quantized)
        return _global_scale(self._magnitude(f"{module}.weight") for module in modules)

    def _magnitude(self, name: str) -> float:
        """The largest of a tensor."""
        if name not in self._magnitudes:
            # It is read again soon, to be quantized.
            weight = map_tensor(name, self.info(name))
            largest = DenseRows([weight]).largest_magnitude()
            if not math.isfinite(largest):
                self.tensor(name)  # says where
            self._magnitudes[name] = largest
        return self._magnitudes[name]

    @cached_property
    def _quantized(self) -> list[str]:
        return [
            name
            for name in self.names()
            if name.endswith(".weight")
            and len(self.info(name).shape) == 2
            and not CONFIG.is_excluded(name.removesuffix(".weight"))
        ]


def check_plain(directory: Path, quantization: QuantizationConfig | None) -> None:
    """Refuse to quantize twice."""
    if quantization is not None:
        raise CheckpointError(
            f"{directory}: is quantized already ({quantization.algorithm}); only bf16, fp16 and "
            "float32 checkpoints can be quantized: leave the option out"
        )


def _global_scale(magnitudes: Iterable[float]) -> float:
    """float32 arithmetic, as ``format.quantize_weight``."""
    amax = np.float32(max(magnitudes))
    # A linear of nothing but zeros is exact under any scale.
    return float(amax / np.float32(nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)) if amax > 0 else 1.0


def _quantize(weights: Sequence[torch.Tensor], global_scale: torch.Tensor) -> nvfp4.QuantizedTensor:
    """Weights [O, K] of one K, as one quantized tensor along O, a few rows at a time."""
    rows, k = sum(len(weight) for weight in weights), weights[0].shape[1]
    codes = torch.empty(rows, k // 2, dtype=torch.uint8)
    block_scale = torch.empty(rows, k // nvfp4.BLOCK, dtype=torch.float8_e4m3fn)
    at, step = 0, max(1, _CHUNK // k)
    for weight in weights:
        for part in torch.split(weight, step):
            done = nvfp4.quantize_weight(part, global_scale)
            codes[at : at + len(part)] = done.codes
            block_scale[at : at + len(part)] = done.block_scale
            at += len(part)
    return nvfp4.QuantizedTensor(codes, block_scale, global_scale)
