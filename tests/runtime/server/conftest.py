"""One server on the demo engine for most tests, and a narrow one for what it refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server import ServerProcess


@pytest.fixture(scope="package")
def server(demo_engine: Callable[..., Path]) -> Iterator[ServerProcess]:
    process = ServerProcess(demo_engine(), "--served-model-name", "demo")
    yield process
    process.close()
