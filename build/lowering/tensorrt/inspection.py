"""What a finished engine file shows of itself, without a GPU to load it on.

The names of fused kernels stand in the plan's text. A kernel made of nothing but casts,
replications and multiplications is a weight that is rewritten to bf16 at every run: with
FP4 activations TensorRT is meant to fuse that into the product, so there it is an error.
"""

import logging
import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtree.build.network.network import NetworkError

log = logging.getLogger(__name__)

_KERNEL = re.compile(
    rb"(__myl_[A-Za-z0-9]+|_gemm_mha_v[0-9]+|__mye[0-9]+_[a-z]*gemm[a-z_]*)(?=_0x)"
)
_REWRITE = re.compile(r"__myl_(?=\w*Repl)(?=\w*Mul)(?:Cast|Mul|Repl|Resh|Move)+$")
_ATTENTION = "_gemm_mha"
# Sections of a tensorrt_rtx plan: name (reversed), offset and size as 64-bit integers.
_ENGINE_SECTION = b"NGNE"
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class BuildLog:
    """What the library's log says of memory: the largest of all profiles, in bytes."""

    activation_bytes: int = 0
    weight_bytes: int = 0

    @classmethod
    def of(cls, messages: Iterable[str]) -> "BuildLog":
        found: dict[str, int] = {"Activation": 0, "Weights": 0}
        for message in messages:
            match = re.search(r"Total (Activation|Weights) Memory: (\d+) bytes", message)
            if match:
                found[match[1]] = max(found[match[1]], int(match[2]))
        return cls(found["Activation"], found["Weights"])


@dataclass(frozen=True)
class Inspection:
    """bytes: of the file. layers: of the network. kernels: distinct fused kernels.
    rewrites: those that widen a weight at every run. attention: fused attention kernels."""

    bytes: int
    layers: int
    memory: BuildLog
    kernels: tuple[str, ...]

    @property
    def rewrites(self) -> tuple[str, ...]:
        return tuple(kernel for kernel in self.kernels if _REWRITE.match(kernel))

    @property
    def attention(self) -> tuple[str, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.startswith(_ATTENTION))

    def manifest(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "weight_bytes": self.memory.weight_bytes,
            "activation_bytes": self.memory.activation_bytes,
            "fused_kernels": len(self.kernels),
            "attention_kernels": list(self.attention),
            "weight_rewrites": list(self.rewrites),
        }

    def check(self, file: str, *, fused_weights: bool, attention: bool) -> None:
        """Refuse or report what the plan shows.

        Args:
            fused_weights: whether every quantized product has FP4 activations, so that
                no weight may be rewritten.
            attention: whether the network attends, so that a fused kernel must be there.

        Raises:
            NetworkError: a weight is rewritten although it should be fused, or attention
                is not fused.
        """
        if self.rewrites and fused_weights:
            raise NetworkError(
                f"{file}: TensorRT rewrites quantized weights to bf16 at every run "
                f"({', '.join(self.rewrites)}) instead of fusing them into the product"
            )
        if self.rewrites:
            log.warning(
                "%s: weights are rewritten to bf16 at every run (%s), as bf16 activations "
                "have no fused product; --activations nvfp4 avoids it",
                file,
                ", ".join(self.rewrites),
            )
        if attention and not self.attention:
            raise NetworkError(f"{file}: no fused attention kernel in the plan")


def inspect_engine(path: Path, layers: int, messages: Iterable[str]) -> Inspection:
    """Read an engine file's kernels; ``messages`` are the library's while building it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        start, end = _engine_section(plan)
        kernels = {match[1].decode() for match in _KERNEL.finditer(plan, start, end)}
        size = len(plan)
    return Inspection(size, layers, BuildLog.of(messages), tuple(sorted(kernels)))


def _engine_section(plan: mmap.mmap) -> tuple[int, int]:
    """Where the code is, as opposed to the weights; everything if the format is another."""
    at = plan.find(_ENGINE_SECTION, 0, _HEADER_BYTES)
    if at < 0:
        return 0, len(plan)
    start, size = (int.from_bytes(plan[at + first : at + first + 8], "little") for first in (8, 16))
    if size == 0 or start + size > len(plan):
        return 0, len(plan)
    return start, start + size
