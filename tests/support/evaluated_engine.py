"""The TensorRT runner with the network evaluator in the place of the GPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowered import describe, evaluators, lower_networks
from network_evaluator import NetworkEvaluator
from trtree.build.builder import EngineDescription
from trtree.build.engine_dir import EngineDir
from trtree.build.lowering.tensorrt import backend
from trtree.build.options import BuildOptions
from trtree.runtime.engines.tensorrt import TensorRTEngine


class EvaluatedExecutable:
    """A network's evaluator behind the runner's interface to a loaded engine."""

    def __init__(self, evaluator: NetworkEvaluator) -> None:
        self.evaluator = evaluator
        self.runs: list[tuple[str, dict[str, tuple[int, ...]]]] = []

    def run(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> None:
        inputs = {name: tensors[name] for name in self.evaluator.inputs}
        values = self.evaluator.run(inputs)
        for name in self.evaluator.outputs:
            if tensors[name].data_ptr() != values[name].data_ptr():
                assert tensors[name].shape == values[name].shape, name
                tensors[name].copy_(values[name])
        self.runs.append((profile, {name: tuple(x.shape) for name, x in inputs.items()}))


def evaluated_engine(
    options: BuildOptions, **changes: Any
) -> tuple[TensorRTEngine, dict[str, EvaluatedExecutable]]:
    """The engine that these options would build, without building it."""
    description = describe(options, **changes)
    lowered = lower_networks(description)
    executables = {
        f"{backend.FILES[name]}.rank0.engine": EvaluatedExecutable(evaluator)
        for name, evaluator in evaluators(lowered).items()
    }
    return TensorRTEngine(
        EngineDir(Path("evaluated"), _manifest(description, lowered)),
        executables,
        torch.device("cpu"),
    ), executables


def _manifest(description: EngineDescription, lowered: Mapping[str, Any]) -> dict[str, Any]:
    """What the builder would write, of networks that were lowered but not compiled."""
    from trtree.build.builder import manifest_of

    sizes = description.engine_sizes
    engines = {
        f"{backend.FILES[name]}.rank0.engine": backend.engine_entry(
            name, 0, network, sizes.profiles(name)
        )
        for name, network in lowered.items()
    }
    built = {"cache_length": sizes.cache_length, "engines": engines}
    return manifest_of(description) | {"sm": list(description.options.sm), "tensorrt": built}
