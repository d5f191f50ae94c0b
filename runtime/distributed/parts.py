"""One rank's part of an engine, by backend."""

from trtree import _core
from trtree.build.engine_dir import EngineDir
from trtree.runtime.distributed.layout import JobError
from trtree.runtime.distributed.worker import Replica
from trtree.runtime.engines import load_engine


def load_part(engine: EngineDir, replica: Replica, num_threads: int) -> _core.Engine:
    """Load what this rank runs, and connect it to its replica's other ranks.

    Raises:
        JobError: the backend does not run on several ranks.
    """
    if replica.size == 1:
        return load_engine(engine, num_threads=num_threads)
    backend = engine.manifest["backend"]
    if backend == "cpu":
        from trtree.runtime.engines.cpu import load_cpu_engine

        return load_cpu_engine(engine, num_threads=num_threads, collectives=replica.collectives())
    if backend in ("tensorrt", "tensorrt-rtx"):
        from trtree.runtime.distributed.nccl import load_tensorrt_part

        return load_tensorrt_part(engine, replica)
    raise JobError(f"{engine.path}: backend {backend} runs on one rank, not on {replica.size}")
