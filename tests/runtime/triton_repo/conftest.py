"""Real servers: one with both layouts, and one for requests with a single response each."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines import ROOT
from tritonserver import TritonServer
from trtree.runtime.triton_repo.repository import write_repository
from trtree.runtime.triton_repo.settings import EngineSettings

ENVIRONMENT = "TRTREE_TRITON_ENV"
# Two processors and many processes: threads that wait for each other cost more than they bring.
SETTINGS = EngineSettings(threads=1)


@pytest.fixture(scope="session")
def triton_environment() -> Path:
    """The virtual environment with tritonserver and this package."""
    path = Path(os.environ.get(ENVIRONMENT, ROOT / ".build" / "triton"))
    assert (path / "bin" / "python3").exists(), f"{path}: no environment; run make triton-env"
    return path


@pytest.fixture(scope="package")
def server(
    demo_engine: Callable[..., Path],
    triton_environment: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """``trtree`` and the older layout's models, streaming."""
    folder = tmp_path_factory.mktemp("both")
    write_repository(demo_engine(), folder / "models", layout="both", settings=SETTINGS)
    with TritonServer(triton_environment, folder / "models", folder / "log") as running:
        yield running


@pytest.fixture(scope="package")
def single_server(
    demo_engine: Callable[..., Path],
    triton_environment: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """Not decoupled: ``trtree`` on two ranks, and the ensemble on one."""
    folder = tmp_path_factory.mktemp("single")
    models = folder / "models"
    one, two = folder / "one", folder / "two"
    write_repository(
        demo_engine(), one, layout="inflight_batcher", settings=SETTINGS, decoupled=False
    )
    write_repository(demo_engine(tp=2), two, settings=SETTINGS, decoupled=False)
    models.mkdir()
    for repository in (one, two):
        for model in repository.iterdir():
            model.rename(models / model.name)
    names = ["trtree", "ensemble", "tensorrt_llm_bls"]
    with TritonServer(triton_environment, models, folder / "log", models=names) as running:
        yield running
