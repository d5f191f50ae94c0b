"""The executor of an engine that runs in this process alone."""

from collections.abc import Callable
from pathlib import Path

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.engines import load_engine
from trtree.runtime.executor import Executor, ExecutorConfig, executor_config


class LocalJob:
    """A job of one rank; every job has these members.

    Args:
        configure: changes the executor's configuration before it is made.

    Raises:
        EngineDirError: no engine there, one for several ranks, or it cannot be loaded.
    """

    is_leader = True

    def __init__(
        self,
        directory: Path,
        *,
        num_threads: int | None = None,
        configure: Callable[[ExecutorConfig], None] = lambda _: None,
    ) -> None:
        self.engine_dir = EngineDir.open(directory)
        ranks = int(self.engine_dir.manifest["mapping"]["world_size"])
        if ranks != 1:
            raise EngineDirError(
                f"{directory}: the engine was built for {ranks} ranks, this is one process; "
                f"start it with mpirun -n {ranks}"
            )
        config = executor_config(self.engine_dir)
        configure(config)
        try:
            engine = load_engine(self.engine_dir, num_threads=num_threads)
            self.executors = [Executor(engine, config)]
        except EngineDirError:
            raise
        except (RuntimeError, MemoryError, ValueError) as error:
            reason = str(error) or "out of memory"
            raise EngineDirError(f"{directory}: the engine cannot be loaded: {reason}") from None

    def work(self) -> None:
        """What ranks other than the leader do until it stops them."""

    def health(self) -> dict[int, str | None]:
        """By rank: None, or what is wrong."""
        return {0: None}
