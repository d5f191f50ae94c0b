"""Lowerings: from networks and checkpoints to an engine directory's files, by backend."""

from collections.abc import Callable, Mapping
from typing import Protocol

from trtree.build.engine_dir import EngineDirWriter
from trtree.build.lowering import cpu, reference_weights
from trtree.build.lowering.division import WHOLE, Shard
from trtree.build.lowering.weights import WeightPlan, WeightReader
from trtree.build.network.network import Network, Owner


class Lowering(Protocol):
    """What each backend's module has."""

    def write_files(
        self,
        out: EngineDirWriter,
        networks: Mapping[str, Network],
        weights: WeightPlan,
        checkpoints: Mapping[Owner, WeightReader],
        progress: Callable[[int], None],
        shard: Shard = WHOLE,
    ) -> None:
        """Stream one rank's weights; ``progress`` is told the bytes after each."""

    def stored_bytes(self, plan: WeightPlan, owner: Owner) -> int:
        """What an owner's weights will take."""


LOWERINGS: dict[str, Lowering] = {"cpu": cpu, "reference": reference_weights}
