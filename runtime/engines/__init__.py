"""Engines by the manifest's ``backend``."""

from pathlib import Path

from trtree import _core
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.engines.reference import ReferenceEngine


def load_engine(engine: EngineDir) -> _core.Engine:
    """The engine of a directory, with its weights loaded.

    Raises:
        EngineDirError: the backend is unknown.
    """
    backend = engine.manifest["backend"]
    if backend != "reference":
        raise EngineDirError(f"{engine.path}: backend {backend!r} is not known to this trtree")
    return ReferenceEngine(engine)


def open_engine(path: Path) -> tuple[EngineDir, _core.Engine]:
    """Check an engine directory against its manifest, then load it."""
    engine = EngineDir.open(path)
    return engine, load_engine(engine)
