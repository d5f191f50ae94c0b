"""The ranks of one server: ``mpirun -n N runtime/serve.py``, or a single process.

    with open_job(directory) as job:
        if job.is_leader:
            serve(job.executors)  # one for each replica
        else:
            job.work()

Rank 0 takes the requests. Each replica's first rank runs an executor; its engine's calls
reach the replica's other ranks. Nothing is spawned: mpirun starts every rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from trtree import _core
from trtree._core import distributed
from trtree.build.engine_dir import MANIFEST, EngineDir, EngineDirError
from trtree.runtime.distributed.agreement import agree
from trtree.runtime.distributed.health import Heartbeats
from trtree.runtime.distributed.layout import JobError, Layout
from trtree.runtime.distributed.parts import load_part
from trtree.runtime.distributed.remote import RemoteExecutor, serve_executor
from trtree.runtime.distributed.worker import Replica
from trtree.runtime.distributed.world import World
from trtree.runtime.engines import load_engine
from trtree.runtime.executor import Executor, ExecutorConfig, ExecutorLike, executor_config

__all__ = ["Job", "JobError", "Layout", "open_job"]

START_TIMEOUT = 600.0  # seconds that rank 0 waits for all ranks to load their weights
END_TIMEOUT = 20.0  # seconds that rank 0 waits for the others once no more requests are taken
MakeConfig = Callable[[EngineDir], ExecutorConfig]


class Job:
    """A single process's job: this rank leads, and there is no other."""

    rank = 0

    def __init__(
        self, engine_dir: EngineDir, layout: Layout, engine: _core.Engine, config: ExecutorConfig
    ) -> None:
        self.engine_dir = engine_dir
        self.layout = layout
        self.capabilities = engine.capabilities()
        # On rank 0, one for each replica; another replica's is spoken to over MPI.
        self.executors: list[ExecutorLike] = [Executor(engine, config)]

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank that takes requests."""
        return self.rank == 0

    def work(self) -> None:
        """On every rank but 0: serve until rank 0 closes the job."""
        raise RuntimeError("rank 0 leads the job; it has nothing to wait for")

    def health(self) -> list[int]:
        """On rank 0: the ranks that have fallen silent; none if all is well."""
        return []

    def ending(self) -> AbstractContextManager[object]:
        """Around what waits for engines to stop: a rank that does not answer ends the job."""
        return nullcontext()

    def close(self) -> None:
        """End what requests there are, and let every rank go."""
        for executor in self.executors:
            executor.shutdown()
        for executor in self.executors:
            # An engine that failed has said so already; the other replicas end all the same.
            with suppress(RuntimeError):
                while executor.await_responses():
                    pass


class RankJob(Job):
    """One rank's part in a job of several."""

    def __init__(
        self,
        world: World,
        engine_dir: EngineDir,
        layout: Layout,
        replica: Replica,
        part: _core.Engine,
        config: ExecutorConfig,
    ) -> None:
        self.rank = world.rank
        self.engine_dir = engine_dir
        self.layout = layout
        self.capabilities = part.capabilities()
        self.executors = []
        self._world = world
        self.replica = replica
        self._part = part
        self._engine = replica.lead(part) if replica.rank == 0 else part
        self._config = config
        self._control = world.comm.Dup()
        self._heartbeats = Heartbeats(world)
        if self.is_leader:
            leaders = [layout.leader(number) for number in range(1, layout.dp)]
            self.executors = [Executor(self._engine, config)]
            self.executors += [RemoteExecutor(self._control, leader) for leader in leaders]

    def work(self) -> None:
        if self.is_leader:
            super().work()
        elif self.replica.rank == 0:
            serve_executor(self._control, Executor(self._engine, self._config))
            self.replica.stop()
        else:
            self.replica.work(self._part)
        self._heartbeats.stop()
        self._world.release()

    def health(self) -> list[int]:
        return self._heartbeats.lost()

    def ending(self) -> AbstractContextManager[object]:
        message = f"error: after {END_TIMEOUT:.0f} s, a rank has not let go; ending the job"
        return distributed.Watchdog(END_TIMEOUT, message)

    def close(self) -> None:
        if self.is_leader:  # work() has returned on others, or the world's guard ends the job
            with self.ending():
                self._close()

    def _close(self) -> None:
        if isinstance(self._engine, distributed.LeaderEngine) and self._engine.failed:
            self._world.abort("its engine failed, and the other ranks may wait for it")
        super().close()
        for executor in self.executors:
            if isinstance(executor, RemoteExecutor):
                executor.stop()
        self.replica.stop()
        self._heartbeats.stop()
        self._world.release()


@contextmanager
def open_job(
    directory: Path,
    *,
    tp: int | None = None,
    dp: int | None = None,
    executor_config: MakeConfig = executor_config,
    prepare: Callable[[], None] = lambda: None,
    num_threads: int | None = None,
    start_timeout: float = START_TIMEOUT,
) -> Iterator[Job]:
    """Load an engine on the ranks that mpirun started, or in this process alone.

    Args:
        tp: ranks of an engine; must be what it was built for. dp: replicas. Their product
            must be the number of ranks; by default there are as many replicas as fit.
        executor_config: makes each executor's configuration.
        prepare: called on rank 0 before any weights are loaded; its ValueError or OSError
            ends the job as a JobError.
        num_threads: of the CPU engine on each rank; default: the processors this process
            may use, divided by the ranks that share them.
        start_timeout: seconds until a rank that does not come up ends the job.

    Raises:
        JobError, EngineDirError: on rank 0 or without a launcher; nothing was loaded.
        SystemExit: on other ranks where a rank could not start; rank 0 says why.
    """
    world = World.connect(start_timeout)
    if world is None:
        prepare()
        job = _single(directory, tp, dp, executor_config, num_threads)
    else:
        world.guard()
        job = _start(world, directory, tp, dp, executor_config, prepare, num_threads, start_timeout)
    try:
        yield job
    finally:
        job.close()


def _single(
    directory: Path,
    tp: int | None,
    dp: int | None,
    make_config: MakeConfig,
    num_threads: int | None,
) -> Job:
    engine_dir = EngineDir.open(directory, verify=False)
    layout = _layout(engine_dir, 1, tp, dp)
    engine_dir.verify()
    try:
        engine = load_engine(engine_dir, num_threads=num_threads)
    except EngineDirError:
        raise
    except (RuntimeError, MemoryError, ValueError) as error:
        reason = str(error) or "out of memory"
        raise EngineDirError(f"{directory}: the engine cannot be loaded: {reason}") from None
    return Job(engine_dir, layout, engine, make_config(engine_dir))


def _start(
    world: World,
    directory: Path,
    tp: int | None,
    dp: int | None,
    make_config: MakeConfig,
    prepare: Callable[[], None],
    num_threads: int | None,
    timeout: float,
) -> Job:
    """Two stages that all ranks must pass: the engine's description, then its weights."""
    error: Exception | None = None
    manifest = ""
    try:
        engine_dir = EngineDir.open(directory, verify=False)
        layout = _layout(engine_dir, world.size, tp, dp)
        config = make_config(engine_dir)
        if world.rank == 0:
            prepare()
        manifest = hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()[:16]
    except (ValueError, OSError) as found:
        error = found
    agree(world, "reading the engine's manifest", error, manifest, timeout)
    replica = Replica(world, layout.replica(world.rank))
    threads = num_threads or world.threads_per_rank()
    try:
        engine_dir.verify(replica.rank)
        part = load_part(engine_dir, replica, threads)
    except (ValueError, OSError, RuntimeError, MemoryError) as found:
        error = found
    agree(world, "loading the weights", error, "", timeout)
    return RankJob(world, engine_dir, layout, replica, part, config)


def _layout(engine_dir: EngineDir, world_size: int, tp: int | None, dp: int | None) -> Layout:
    built: int = engine_dir.manifest["mapping"]["tp_size"]
    return Layout.of(str(engine_dir.path), built, world_size, tp, dp)
