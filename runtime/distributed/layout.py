"""Which rank does what: replicas one after another, each of ``tp`` ranks."""

from dataclasses import dataclass


class JobError(ValueError):
    """A job that cannot start; says what differs, with both values, and what to type."""


@dataclass(frozen=True)
class Layout:
    """``dp`` replicas of an engine of ``tp`` ranks. Rank 0 takes the requests."""

    tp: int
    dp: int

    @classmethod
    def of(
        cls, engine: str, built_tp: int, world_size: int, tp: int | None, dp: int | None
    ) -> "Layout":
        """The layout of a world of that size; ``tp`` and ``dp`` are what was asked for.

        Raises:
            JobError: the engine, the request and the world do not fit one another.
        """
        if tp is not None and tp != built_tp:
            raise JobError(
                f"{engine}: built for {built_tp} tensor-parallel ranks, --tp asks for {tp}; leave "
                f"--tp out, or rebuild with --tp {tp}"
            )
        replicas = dp or max(1, world_size // built_tp)
        if replicas * built_tp != world_size:
            raise JobError(
                f"{engine}: mpirun started {world_size} ranks; tp {built_tp} x dp {replicas} are "
                f"{built_tp * replicas}: run mpirun -n {built_tp * replicas}"
            )
        return cls(built_tp, replicas)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def replica(self, rank: int) -> int:
        return rank // self.tp

    def leader(self, replica: int) -> int:
        """The rank that runs a replica's executor."""
        return replica * self.tp

    def is_leader(self, rank: int) -> bool:
        return rank % self.tp == 0
