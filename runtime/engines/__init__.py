"""Engines by the manifest's ``backend``."""

import logging
from pathlib import Path

from trtree import _core
from trtree.build.engine_dir import EngineDir, EngineDirError

log = logging.getLogger(__name__)


def load_engine(engine: EngineDir, *, num_threads: int | None = None) -> _core.Engine:
    """The engine of a directory, with its weights loaded or mapped.

    Each backend is imported when it is asked for: the CPU engine does without torch.

    Args:
        num_threads: of the CPU engine; default: the processors this process may use.

    Raises:
        EngineDirError: the backend is unknown.
    """
    backend = engine.manifest["backend"]
    build = engine.manifest["build_config"]
    if build["request_state_bytes"] and not build.get("state_snapshots", 0):
        log.info(
            "%s: requests have recurrent state, and the engine keeps no snapshots of it: the "
            "prefix cache is off",
            engine.path,
        )
    if backend == "cpu":
        from trtree.runtime.engines.cpu import load_cpu_engine

        return load_cpu_engine(engine, num_threads=num_threads)
    if backend == "reference":
        import torch

        from trtree.runtime.engines.reference import ReferenceEngine

        # Its many small operations run several times slower on two threads than on one.
        torch.set_num_threads(num_threads or 1)
        return ReferenceEngine(engine)
    if backend in ("tensorrt", "tensorrt-rtx"):
        from trtree.runtime.engines.tensorrt_cuda import load_tensorrt_engine

        return load_tensorrt_engine(engine)
    raise EngineDirError(f"{engine.path}: backend {backend!r} is not known to this trtree")


def open_engine(path: Path) -> tuple[EngineDir, _core.Engine]:
    """Check an engine directory against its manifest, then load it."""
    engine = EngineDir.open(path)
    return engine, load_engine(engine)
