"""What a build's checkpoints hold, as the weight source of its networks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trtree.build.checkpoint import (
    Checkpoint,
    CheckpointError,
    QuantizationConfig,
    QuantizedCheckpoint,
    text_part,
)
from trtree.build.checkpoint.headers import check_dense
from trtree.build.checkpoint.json_file import read_json
from trtree.build.checkpoint.quantization import read_quantization
from trtree.build.checkpoint.quantized import CONFIG as BY_BUILDER
from trtree.build.checkpoint.quantized import check_plain
from trtree.build.checkpoint.scheme import ALGORITHMS
from trtree.build.lowering.weights import WeightReader
from trtree.build.network.graph import LowRank, WeightInfo, WeightSource
from trtree.build.network.network import Activations, Owner, tensor_name
from trtree.build.options import BuildOptions
from trtree.plugins.nvfp4_linear.format import BLOCK


class BuildSource(WeightSource, Protocol):
    """A weight source that also knows the configurations."""

    def config(self, owner: Owner) -> Mapping[str, Any]: ...
    def quantization(self, owner: Owner) -> QuantizationConfig | None: ...


@runtime_checkable
class SourceWithWeights(BuildSource, Protocol):
    """A source whose weights are at hand, so that an engine can be written."""

    def checkpoint(self, owner: Owner) -> WeightReader: ...


@dataclass(frozen=True)
class CheckpointSource:
    """Describes modules from the headers of the target's and the drafter's checkpoints.

    ``activations`` overrides what the checkpoints' quantization asks for.
    """

    target: Checkpoint
    drafter: Checkpoint | None = None
    activations: Activations | None = None

    @classmethod
    def open(cls, options: BuildOptions) -> "CheckpointSource":
        """Open the checkpoints; those that the build is to quantize read as quantized.

        Raises:
            CheckpointError: as ``Checkpoint.open``; one to be quantized already is.
        """
        target = Checkpoint.open(options.checkpoint)
        drafter = Checkpoint.open(options.drafter) if options.drafter else None
        if options.quantize:
            target = QuantizedCheckpoint(target)
        if drafter and options.quantize_drafter:
            # Its context pass fuses the keys and values of all layers, its block pass
            # those of one: they have to be the same numbers.
            drafter = QuantizedCheckpoint(drafter, one_scale=True)
        return cls(target, drafter, options.activations)

    def checkpoint(self, owner: Owner) -> Checkpoint:
        """The checkpoint that ``owner`` names."""
        if owner == "target":
            return self.target
        if self.drafter is None:
            raise ValueError("this build has no drafter")
        return self.drafter

    def config(self, owner: Owner) -> Mapping[str, Any]:
        return self.checkpoint(owner).config

    def quantization(self, owner: Owner) -> QuantizationConfig | None:
        return self.checkpoint(owner).quantization

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        """From headers, and from what modules may share: what scales inputs, a first factor.

        Raises:
            CheckpointError: the module has no weight, or an inconsistent one.
        """
        checkpoint = self.checkpoint(owner)
        name = tensor_name(module)
        info = checkpoint.info(name) if name == module else checkpoint.weight_info(module)
        vector = len(info.shape) == 1
        depthwise = len(info.shape) == 3 and info.shape[1] == 1
        if (vector or depthwise) and not name.endswith("d2t"):
            check_dense(name, info)
        if vector:
            return WeightInfo("dense", tuple(info.shape), _name(info.dtype))
        if depthwise:  # a vector, channel by channel
            return WeightInfo("dense", (info.shape[0] * info.shape[2],), _name(info.dtype))
        linear = checkpoint.linear_info(module)
        shape = (linear.out_features, linear.in_features)
        if linear.kind == "dense" or checkpoint.quantization is None:
            return WeightInfo("dense", shape, _name(linear.dtype), linear.has_bias)
        return WeightInfo(
            "nvfp4",
            shape,
            "nvfp4",
            linear.has_bias,
            _activations(self.activations, module, checkpoint.quantization.algorithm_of(module)),
            checkpoint.input_digest(module) if linear.has_pre_quant_scale else None,
            LowRank(linear.rank, checkpoint.factor_digest(module)) if linear.rank else None,
        )


@dataclass(frozen=True)
class ConfigSource:
    """Describes modules from configuration files alone, for planning without weights.

    Weights are what config.json implies: NVFP4 where the quantization covers them and
    they are no vector, embedding or head; bf16 elsewhere.
    """

    configs: Mapping[Owner, Mapping[str, Any]]
    quantizations: Mapping[Owner, QuantizationConfig | None]
    activations: Activations | None = None

    @classmethod
    def open(cls, options: BuildOptions) -> "ConfigSource":
        """Read config.json (and hf_quant_config.json, if there) of both directories.

        Raises:
            CheckpointError: a file is missing or invalid, or a checkpoint to be quantized
                already is.
        """
        directories: dict[Owner, Path] = {"target": options.checkpoint}
        if options.drafter is not None:
            directories["drafter"] = options.drafter
        files = {owner: path / "config.json" for owner, path in directories.items()}
        configs = {
            owner: text_part.text_config(read_json(file), str(file))
            for owner, file in files.items()
        }
        quantizations = {
            owner: text_part.quantization(read_quantization(path, configs[owner]))
            for owner, path in directories.items()
        }
        asked = {"target": options.quantize, "drafter": options.quantize_drafter}
        for owner, path in directories.items():
            if asked[owner]:
                check_plain(path, quantizations[owner])
                quantizations[owner] = BY_BUILDER
        return cls(configs, quantizations, options.activations)

    def with_drafter(self, config: Mapping[str, Any], *, quantized: bool) -> "ConfigSource":
        """With a drafter that has no directory, only a configuration."""
        return replace(
            self,
            configs={**self.configs, "drafter": config},
            quantizations={**self.quantizations, "drafter": BY_BUILDER if quantized else None},
        )

    def config(self, owner: Owner) -> Mapping[str, Any]:
        return self.configs[owner]

    def quantization(self, owner: Owner) -> QuantizationConfig | None:
        return self.quantizations[owner]

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        quantization = self.quantizations[owner]
        plain = len(implied) == 1 or module.endswith(("embed_tokens", "lm_head"))
        algorithm = None if plain or quantization is None else quantization.algorithm_of(module)
        if quantization is None or algorithm is None:
            return WeightInfo("dense", implied, "bfloat16")
        if ALGORITHMS[algorithm].weights == "fp8":
            return WeightInfo("dense", implied, "float32")
        if implied[-1] % BLOCK:
            raise CheckpointError(
                f"config.json: {module} would be {algorithm} of {implied[-1]} in_features, which "
                f"are no multiple of {BLOCK}"
            )
        activations = _activations(self.activations, module, algorithm)
        return WeightInfo("nvfp4", implied, "nvfp4", False, activations)


def _activations(asked: Activations | None, module: str, algorithm: str | None) -> Activations:
    """What is asked for, as far as the checkpoint has what it needs; else the checkpoint's."""
    own = ALGORITHMS[algorithm].activations if algorithm else None
    assert own is not None  # the caller asks of NVFP4 linears only
    if asked == "nvfp4" and own != "nvfp4":
        raise CheckpointError(
            f"activations nvfp4: {module} is {algorithm}, so it has no "
            f"input_scale for NVFP4; use --activations {own}, or a checkpoint that is NVFP4"
        )
    return asked or own


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
