"""The TensorRT runner with the network evaluator in the place of the GPU."""

import threading
from collections.abc import Iterator, Mapping, Sequence
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
from trtree.plugins.branch_tables import BranchTables
from trtree.plugins.gated_delta_net.commit import commit as commit_recurrence
from trtree.plugins.gated_delta_net.contract import RowUpdates
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.tree_attention.contract import AttentionSegment
from trtree.plugins.tree_attention.plan import RowTables
from trtree.runtime.engines.tensorrt import TensorRTEngine
from trtree.runtime.engines.tensorrt_commits import Commits, PagesCommit
from trtree.runtime.engines.tensorrt_paged import PagedTensorRTEngine


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


class ReferenceCommits:
    """The commit kernels' contracts, by the references."""

    def pages(self, caches: Sequence[torch.Tensor]) -> PagesCommit:
        def commit(tables: RowTables, accepted: torch.Tensor, num_accepted: torch.Tensor) -> None:
            for request, count in enumerate(num_accepted.tolist()):
                prefix, pages = int(tables.prefix_lengths[request]), tables.page_table[request]
                segment, rows = AttentionSegment(0, 0, prefix, pages.long()), accepted[request]
                for cache in caches:
                    latent_cache.commit(LatentCache(cache), segment, rows[:count].long())

        return commit

    def window(
        self,
        window: torch.Tensor,
        x: torch.Tensor,
        tables: BranchTables,
        accepted: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        for slot, fresh, rows in _paths(tables, accepted, num_accepted):
            before = torch.zeros_like(window[slot]) if fresh else window[slot].clone()
            window[slot] = torch.cat([before, x[rows]])[-window.shape[1] :]

    def state(
        self,
        state: torch.Tensor,
        rows: RowUpdates,
        tables: BranchTables,
        accepted: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        for slot, fresh, path in _paths(tables, accepted, num_accepted):
            k = torch.nn.functional.normalize(rows.k[path].double(), dim=-1)
            before = state[slot].double() * (0.0 if fresh else 1.0)
            state[slot] = commit_recurrence(
                before,
                k.transpose(0, 1),
                rows.update[path].double().transpose(0, 1),
                rows.decay[path].double().T,
            ).float()


def _paths(
    tables: BranchTables, accepted: torch.Tensor, num_accepted: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Of requests that accepted rows: slot, whether nothing is committed, rows of the step."""
    requests = tables.requests.tolist()
    for index, ((first, _, slot, fresh), count) in enumerate(
        zip(requests, num_accepted.tolist(), strict=True)
    ):
        if count:
            yield slot, fresh, first + accepted[index, :count].long()


def evaluated_engine(
    options: BuildOptions, commits: Commits | None = None, **changes: Any
) -> tuple[Any, dict[str, EvaluatedExecutable]]:
    """The engine that these options would build, without building it; paged with attention
    plugins, committed by ``commits``, by default the references."""
    description = describe(options, **changes)
    lowered = lower_networks(description)
    executables = {
        _file(name, 0): EvaluatedExecutable(evaluator)
        for name, evaluator in evaluators(lowered).items()
    }
    return _engine(description, 0, lowered, executables, commits), executables


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
        engines.append(_engine(description, rank, lowered, executables, None))
    return engines


def _engine(
    description: EngineDescription,
    rank: int,
    lowered: Mapping[str, LoweredNetwork],
    executables: Mapping[str, EvaluatedExecutable],
    commits: Commits | None,
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
    return PagedTensorRTEngine(
        directory, executables, cpu, commits or ReferenceCommits(), target_ctas=64, rank=rank
    )


def _file(network: str, rank: int) -> str:
    return f"{backend.FILES[network]}.rank{rank}.{backend.SUFFIX}"
