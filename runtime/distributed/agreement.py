"""Starting together: every rank reports a stage done or failed, and all hear the verdict.

Point to point and with a time-out, because a rank that hangs takes no part in collectives.
"""

import time
from dataclasses import dataclass
from functools import partial

from trtree.runtime.distributed.layout import JobError
from trtree.runtime.distributed.world import World, wait_for

_REPORT, _VERDICT = 1, 2
_GRACE = 10.0  # seconds that rank 0's verdict may come after its own time-out


@dataclass(frozen=True)
class _Report:
    stage: str
    host: str
    error: str | None
    value: str


def agree(world: World, stage: str, error: Exception | None, value: str, timeout: float) -> None:
    """Return once every rank has done the stage, with equal values.

    Args:
        error: why this rank failed, or None.
        value: what all ranks must have in common, such as a manifest's hash.
        timeout: seconds that rank 0 waits for the slowest rank.

    Raises:
        JobError: on rank 0, the first rank's error, or how two values differ.
        SystemExit: on other ranks, with status 2, as rank 0 says why.
    """
    report = _Report(stage, world.host, str(error) if error else None, value)
    if world.rank > 0:
        sent = world.comm.isend(report, 0, _REPORT)
        probe = wait_for(lambda: world.comm.iprobe(0, _VERDICT), timeout + _GRACE)
        if probe is None:
            world.abort(f"no answer from rank 0 in {timeout + _GRACE:.0f} s ({stage})")
        if world.comm.recv(source=0, tag=_VERDICT):
            world.release()
            raise SystemExit(2)
        sent.wait()
        return
    verdict = _verdict(_collect(world, report, timeout))
    for rank in range(1, world.size):
        world.comm.send(verdict, rank, _VERDICT)
    if verdict is not None:
        world.release()
        raise JobError(verdict) from error


def _collect(world: World, own: _Report, timeout: float) -> dict[int, _Report]:
    reports = {0: own}
    deadline = time.monotonic() + timeout
    for rank in range(1, world.size):
        left = max(0.0, deadline - time.monotonic())
        if wait_for(partial(world.comm.iprobe, rank, _REPORT), left) is None:
            missing = [r for r in range(rank, world.size) if not world.comm.iprobe(r, _REPORT)]
            world.abort(
                f"after {timeout:.0f} s, {own.stage} is still not done on rank "
                f"{', '.join(map(str, missing))}; ending the job"
            )
        reports[rank] = world.comm.recv(source=rank, tag=_REPORT)
    return reports


def _verdict(reports: dict[int, _Report]) -> str | None:
    for rank, report in reports.items():
        if report.error is not None:
            return report.error if rank == 0 else f"rank {rank} on {report.host}: {report.error}"
    own = reports[0]
    for rank, report in reports.items():
        if (report.stage, report.value) != (own.stage, own.value):
            return (
                f"rank {rank} on {report.host} has {report.value} ({report.stage}), rank 0 on "
                f"{own.host} has {own.value} ({own.stage}); give all ranks the same engine"
            )
    return None
