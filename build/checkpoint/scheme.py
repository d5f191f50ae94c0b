"""What is quantized in a checkpoint, and how: one description for all exporters."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from trtree.build.checkpoint.patterns import matcher
from trtree.plugins.nvfp4_linear.format import BLOCK

MIXED = "MIXED_PRECISION"
# FP8 in blocks of 128 x 128, as transformers, DeepSeek and Qwen write it ("fp8").
FP8_BLOCK = "FP8_BLOCK"
SVD = "NVFP4_SVD"
W4A8 = "W4A8_NVFP4_FP8"
Layout = Literal["modelopt", "compressed-tensors"]


class Algorithm(NamedTuple):
    """How a linear's weight is stored, and what its input is rounded to.

    FP8 linears are widened when read and work on unrounded inputs (W8A16): they give up
    none of the checkpoint's accuracy, and memory instead. Their activations are None. Those of
    W4A8_NVFP4_FP8 are not rounded to FP8 either.
    """

    weights: Literal["nvfp4", "fp8"]
    activations: Literal["nvfp4", "bf16"] | None


# By ModelOpt's names, but for FP8_BLOCK. NVFP4_AWQ is NVFP4 whose inputs are scaled per
# feature first; NVFP4_SVD has low-rank factors beside that (SVDQuant), which it adds in floats.
ALGORITHMS = {
    "NVFP4": Algorithm("nvfp4", "nvfp4"),
    "W4A16_NVFP4": Algorithm("nvfp4", "bf16"),
    "NVFP4_AWQ": Algorithm("nvfp4", "nvfp4"),
    SVD: Algorithm("nvfp4", "nvfp4"),
    W4A8: Algorithm("nvfp4", "bf16"),
    "FP8": Algorithm("fp8", None),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm("fp8", None),
    FP8_BLOCK: Algorithm("fp8", None),
}
# Columns that share a block scale. Two blocks of 16 can be one of 32, which ModelOpt's W4A8 has.
GROUPS = {W4A8: (BLOCK, 2 * BLOCK)}
MODELOPT = tuple(name for name in ALGORITHMS if name != FP8_BLOCK)


def group_sizes(algorithm: str) -> tuple[int, ...]:
    """How many columns of an NVFP4 algorithm's weights may share a block scale."""
    return GROUPS.get(algorithm, (BLOCK,))


_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?P<leaf>\w+)")


@dataclass(frozen=True)
class QuantizationConfig:
    """What is quantized, and how.

    algorithm: a key of ``ALGORITHMS``, or "MIXED_PRECISION". exclusions: patterns of
    modules left alone. kv_cache: the algorithm calibrated for the KV cache, or None.
    source: the file this was read from, for messages. layout: whose names the tensors
    have. layers: patterns of modules and their algorithms, where these are mixed; the
    first that covers a module counts, and others are not quantized.
    """

    algorithm: str
    exclusions: tuple[str, ...] = ()
    kv_cache: str | None = None
    source: str = "hf_quant_config.json"
    layout: Layout = "modelopt"
    layers: tuple[tuple[str, str], ...] = ()

    def algorithm_of(self, module: str) -> str | None:
        """A module's algorithm; None if the configuration leaves it unquantized."""
        names = _names(module)
        if any(self._excluded.fullmatch(name) for name in names):
            return None
        if self.algorithm != MIXED:
            return self.algorithm
        exact = (self._exact[name] for name in names if name in self._exact)
        wild = (
            algorithm
            for pattern, algorithm in self._patterns
            if any(pattern.fullmatch(name) for name in names)
        )
        return next(exact, None) or next(wild, None)

    def activations_of(self, module: str) -> Literal["nvfp4", "bf16"] | None:
        """What a module's input is rounded to; None if it is not, or not quantized."""
        algorithm = self.algorithm_of(module)
        return ALGORITHMS[algorithm].activations if algorithm else None

    def is_excluded(self, module: str) -> bool:
        """Whether the configuration leaves this module unquantized."""
        return self.algorithm_of(module) is None

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        return matcher(self.exclusions)

    @cached_property
    def _exact(self) -> dict[str, str]:
        return dict(self.layers)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """Of names with wildcards; a list of thousands of exact ones would be slow."""
        wild = [(p, name) for p, name in self.layers if "*" in p or p.startswith("re:")]
        return [(matcher([pattern]), name) for pattern, name in wild]


def _names(module: str) -> list[str]:
    """What a configuration may call a module: an expert's linear also by its fused names."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        return [module]
    leaf = "gate_up_proj" if match["leaf"] in ("gate_proj", "up_proj") else match["leaf"]
    return [module, f"{match['experts']}.{leaf}", match["experts"]]
