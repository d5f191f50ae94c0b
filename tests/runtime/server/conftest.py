"""A server on the demo engine, for most tests."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server import ServerProcess
from trtree.runtime import calibrate


@pytest.fixture(scope="package")
def server(
    demo_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Calibrated, in a copy that others do not see."""
    engine = Path(shutil.copytree(demo_engine(), tmp_path_factory.mktemp("served") / "demo"))
    assert calibrate.main(["--engine", str(engine), "--threads", "1", "--seconds", "0.3"]) == 0
    process = ServerProcess(engine)
    yield process
    process.close()
