"""Lowerings: from networks and checkpoints to an engine directory's files, by backend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trtree.build.engine_dir import EngineDirWriter
from trtree.build.lowering import cpu, reference_weights
from trtree.build.lowering.shard import RankNetworks
from trtree.build.lowering.weights import WeightPlan, WeightReader
from trtree.build.network.network import Owner


class Lowering(Protocol):
    """What each backend's module has."""

    def write_files(
        self,
        out: EngineDirWriter,
        ranks: Sequence[RankNetworks],
        checkpoints: Mapping[Owner, WeightReader],
        progress: Callable[[int], None],
    ) -> None:
        """Stream the weights of all ranks; ``progress`` is told the bytes after each."""

    def stored_bytes(self, plan: WeightPlan, owner: Owner) -> int:
        """What an owner's weights will take."""


LOWERINGS: dict[str, Lowering] = {"cpu": cpu, "reference": reference_weights}
