"""How a build stores the target's KV cache: in the engine's own type, or as FP8 with scales.

FP8 keeps e4m3(key / k_scale), rounded to nearest even and saturated, and reads code * k_scale;
values likewise (``plugins/tree_attention/contract.py``). ModelOpt's exporter defines a scale as
the calibrated amax / 448, for FP8 caches and for NVFP4 ones alike
(``modelopt.torch.export.unified_export_hf``), so that either's scales are those of FP8.
A drafter's cache is kept in the engine's own type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.build.checkpoint.patterns import left_out, matcher
from trtree.build.network.graph import KvScales
from trtree.build.network.network import DType, Network
from trtree.build.options import BuildOptions, OptionError
from trtree.build.source import BuildSource, SourceWithWeights
from trtree.plugins.tree_attention.tiles import FP8_MIN_SM

FP8: DType = "float8_e4m3fn"


@dataclass(frozen=True)
class KvCache:
    """What a build decided.

    option: as asked for. algorithm: what the checkpoint's cache was calibrated for, if it was.
    scales: the checkpoint's, by tensor; ``known`` unless only configuration files were read.
    stored_as: the type it is kept in. why: if it is not as it was calibrated, the reason.
    """

    option: str
    algorithm: str | None
    scales: Mapping[str, float]
    known: bool
    stored_as: DType
    why: str | None = None

    @property
    def graph_scales(self) -> KvScales | None:
        """For the target's graph; see ``Graph``."""
        return self._of_scope if self.stored_as == FP8 else None

    def _of_scope(self, scope: str) -> tuple[float, float]:
        k, v = (
            next((self.scales[name] for name in names if name in self.scales), 1.0)
            for names in _names(scope)
        )
        return k, v

    def checked(self, network: Network, config: Mapping[str, Any]) -> "KvCache":
        """Once the target's network is known.

        Raises:
            OptionError: FP8 was asked for, and its cache is not keys and values.
            CheckpointError: a scale belongs to no cache.
        """
        others = [s.name for s in network.states.values() if s.paged and s.kind != "kv"]
        if others and self.option == "fp8":
            raise OptionError(
                f"kv_cache fp8: {others[0]} is a latent, which is kept in {network.dtype}; leave "
                "kv_cache out"
            )
        if others and self.stored_as == FP8:
            why = f"latents are kept in {network.dtype}"
            return replace(self, stored_as=network.dtype, why=why)
        read = {name for names in _scales_of(network) for name in names}
        ignored = matcher(left_out(config))
        for name in self.scales if self.stored_as == FP8 else ():
            if name not in read and not ignored.fullmatch(name):
                raise CheckpointError(f"tensor {name} is the scale of no KV cache of this model")
        return self

    def summary(self, network: Network) -> str:
        """One line: what it is kept in, with which scales, and why it is not as calibrated."""
        if self.stored_as != FP8:
            if self.algorithm is None:
                return self.stored_as
            return f"{self.stored_as}; calibrated for {self.algorithm}: {self.why}"
        if not self.known:
            return "FP8 (e4m3)"
        wanted = _scales_of(network)
        found = sum(any(name in self.scales for name in names) for names in wanted)
        scales = f"{found} scales of the checkpoint"
        if self.algorithm not in (None, "FP8"):
            scales += f", calibrated for {self.algorithm}"
        if lacking := len(wanted) - found:
            scales += f", the {lacking} that it lacks are 1.0"
        return f"FP8 (e4m3), {scales}"

    def manifest(self) -> dict[str, Any]:
        """Its part of the manifest's ``build_config``."""
        return {
            "option": self.option,
            "calibrated_for": self.algorithm,
            "stored_as": self.stored_as,
            "why": self.why,
            "scales": dict(self.scales),
        }


def decide(options: BuildOptions, source: BuildSource, dtype: DType) -> KvCache:
    """How the target's cache is stored, where ``dtype`` is the engine's own type.

    Raises:
        OptionError: FP8 was asked for, and the backend or the SM cannot store it.
        CheckpointError: a scale is not a positive number.
    """
    quantization = source.quantization("target")
    algorithm = quantization.kv_cache if quantization else None
    checkpoint = source.checkpoint("target") if isinstance(source, SourceWithWeights) else None
    scales = checkpoint.kv_scales() if isinstance(checkpoint, Checkpoint) else {}
    kept = KvCache(options.kv_cache, algorithm, scales, checkpoint is not None, dtype)
    obstacle = _obstacle(options)
    if options.kv_cache == "fp8":
        if obstacle:
            raise OptionError(f"kv_cache fp8: {obstacle}; leave kv_cache out")
        return replace(kept, stored_as=FP8)
    if algorithm is None:
        return kept
    if options.kv_cache == "float":
        return replace(kept, why="kv_cache is float")
    if algorithm == "NVFP4":
        instead = "" if obstacle else "; --kv-cache fp8 is nearest"
        return replace(kept, why=f"no backend stores that{instead}")
    return replace(kept, why=obstacle) if obstacle else replace(kept, stored_as=FP8)


def _obstacle(options: BuildOptions) -> str | None:
    """Why this build cannot store FP8."""
    if not options.on_tensorrt:
        return None
    if options.attention == "native":
        instead = ", --attention plugin stores FP8" if options.backend == "tensorrt" else ""
        return f"TensorRT's own cache layer takes float32, fp16 and bf16 alone{instead}"
    below = [sm for sm in options.sm if sm < FP8_MIN_SM]
    if below:
        return f"SM {below[0]} has no e4m3, SM {FP8_MIN_SM} and newer have"
    return None


def _scales_of(network: Network) -> list[tuple[str, str]]:
    """Of every cache of keys or of values, the names that its scale may have."""
    scopes = [s.name.removesuffix(".kv") for s in network.states.values() if s.kind == "kv"]
    return [names for scope in scopes for names in _names(scope)]


def _names(scope: str) -> list[tuple[str, str]]:
    """Of the scales of its keys and of its values: ModelOpt's name, compressed-tensors'."""
    return [(f"{scope}.{part}_proj.{part}_scale", f"{scope}.{part}_scale") for part in "kv"]
