"""The TensorRT runner with the network evaluator in the place of the GPU."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowered import describe, evaluators, lower_networks
from network_evaluator import Collective, NetworkEvaluator, collective_result
from trtree.build.builder import EngineDescription, manifest_of
from trtree.build.engine_dir import EngineDir
from trtree.build.lowering.division import Shard
from trtree.build.lowering.tensorrt import backend
from trtree.build.lowering.tensorrt.lower import LoweredNetwork
from trtree.build.options import BuildOptions
from trtree.plugins import latent_cache
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import RowTables
from trtree.runtime.engines.tensorrt import TensorRTEngine
from trtree.runtime.engines.tensorrt_paged import KvCommit, PagedTensorRTEngine


class EvaluatedExecutable:
    """A network's evaluator behind the runner's interface to a loaded engine."""

    def __init__(self, evaluator: NetworkEvaluator) -> None:
        self.evaluator = evaluator
        self.runs: list[tuple[str, dict[str, tuple[int, ...]]]] = []

    def run(self, profile: str, tensors: Mapping[str, torch.Tensor]) -> None:
        inputs = {name: tensors[name] for name in self.evaluator.inputs}
        values = self.compute(inputs)
        for name in self.evaluator.outputs:
            if tensors[name].data_ptr() != values[name].data_ptr():
                assert tensors[name].shape == values[name].shape, name
                tensors[name].copy_(values[name])
        self.runs.append((profile, {name: tuple(x.shape) for name, x in inputs.items()}))

    def compute(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.evaluator.run(inputs)


class Meeting:
    """Where the threads of several ranks exchange what their collectives carry."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._waiting: list[Collective | None] = [None] * ranks

    def exchange(self, rank: int, mine: Collective) -> torch.Tensor:
        self._waiting[rank] = mine
        self._barrier.wait()
        together = [collective for collective in self._waiting if collective is not None]
        assert {(c.name, c.operation) for c in together} == {(mine.name, mine.operation)}
        result = collective_result(mine.operation, [c.value for c in together])
        self._barrier.wait()  # nobody writes the next one before all have read
        return result


class RankExecutable(EvaluatedExecutable):
    """One rank of several, each in a thread of its own."""

    def __init__(self, evaluator: NetworkEvaluator, rank: int, meeting: Meeting) -> None:
        super().__init__(evaluator)
        self._rank, self._meeting = rank, meeting

    def compute(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        steps = self.evaluator.steps(inputs)
        answer: torch.Tensor | None = None
        try:
            while True:
                answer = self._meeting.exchange(self._rank, steps.send(answer))
        except StopIteration as finished:
            return finished.value


CommitFor = Callable[[Sequence[torch.Tensor]], KvCommit]


def reference_commit(caches: Sequence[torch.Tensor]) -> KvCommit:
    """The commit kernel's contract, by the reference."""

    def commit(tables: RowTables, accepted: torch.Tensor, num_accepted: torch.Tensor) -> None:
        for request, count in enumerate(num_accepted.tolist()):
            prefix, pages = int(tables.prefix_lengths[request]), tables.page_table[request].long()
            segment = AttentionSegment(0, 0, prefix, pages)
            for cache in caches:
                latent_cache.commit(LatentCache(cache), segment, accepted[request, :count].long())

    return commit


def evaluated_engine(
    options: BuildOptions, commit_for: CommitFor = reference_commit, **changes: Any
) -> tuple[Any, dict[str, EvaluatedExecutable]]:
    """The engine that these options would build, without building it; paged with attention
    plugins, whose commit ``commit_for`` makes."""
    description = describe(options, **changes)
    lowered = lower_networks(description)
    executables = {
        _file(name, 0): EvaluatedExecutable(evaluator)
        for name, evaluator in evaluators(lowered).items()
    }
    return _engine(description, 0, lowered, executables, commit_for), executables


def evaluated_ranks(options: BuildOptions, ranks: int, **changes: Any) -> list[Any]:
    """The engines of all ranks; each is to be driven from a thread of its own."""
    description = describe(options, tp=ranks, **changes)
    meeting = Meeting(ranks)
    engines = []
    for rank in range(ranks):
        lowered = lower_networks(description, rank=rank, ranks=ranks)
        executables = {
            _file(name, rank): RankExecutable(evaluator, rank, meeting)
            for name, evaluator in evaluators(lowered).items()
        }
        engines.append(_engine(description, rank, lowered, executables, reference_commit))
    return engines


def _engine(
    description: EngineDescription,
    rank: int,
    lowered: Mapping[str, LoweredNetwork],
    executables: Mapping[str, EvaluatedExecutable],
    commit_for: CommitFor,
) -> TensorRTEngine | PagedTensorRTEngine:
    """With the manifest that the builder would write."""
    sizes, shard = description.engine_sizes, Shard(rank, description.options.tp)
    engines = {
        _file(name, rank): backend.engine_entry(
            name, rank, network, sizes.profiles(description.networks[name], shard)
        )
        for name, network in lowered.items()
    }
    built = {"cache_length": sizes.cache_length, "engines": engines}
    sms = list(description.options.sm)
    manifest = manifest_of(description) | {"sm": sms, "tensorrt": built}
    directory = EngineDir(Path("evaluated"), manifest)
    cpu = torch.device("cpu")
    if description.options.attention == "native":
        return TensorRTEngine(directory, executables, cpu, rank)
    return PagedTensorRTEngine(directory, executables, cpu, commit_for, target_ctas=64, rank=rank)


def _file(network: str, rank: int) -> str:
    return f"{backend.FILES[network]}.rank{rank}.{backend.SUFFIX}"
