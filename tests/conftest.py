"""Shared fixtures: the demo engine in its variants, built once per session."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# Triton decides at its import; tests run its kernels on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

import torch

# Helper modules beside the tests.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from engines import DEMO, ROOT, build_demo
from trtree.runtime.executor import Request
from trtree.runtime.session import Session

# Many small operations: threads cost more than they bring, most of all on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build (once) the demo engine with the given build options; returns its directory."""
    built: dict[tuple[tuple[str, object], ...], Path] = {}
    root = tmp_path_factory.mktemp("engines")

    def build(**options: object) -> Path:
        key = tuple(sorted(options.items()))
        if key not in built:
            built[key] = build_demo(root / f"engine{len(built)}", **options)
        return built[key]

    return build


@pytest.fixture(scope="session")
def demo_session(demo_engine: Callable[..., Path]) -> Callable[..., Session]:
    """A loaded session on the demo engine with the given build options."""
    loaded: dict[Path, Session] = {}

    def load(**options: object) -> Session:
        path = demo_engine(**options)
        return loaded.setdefault(path, Session(path)) if path not in loaded else loaded[path]

    return load


@pytest.fixture(scope="session")
def expected(demo_session: Callable[..., Session]) -> Callable[..., str]:
    """What the engine continues a prompt with, plain and alone."""
    session = demo_session()

    def generate(prompt: str, max_tokens: int) -> str:
        request = Request(
            session.tokenizer.encode(prompt),
            max_tokens,
            session.stop_token_ids,
            speculative=session.speculative_config("plain"),
        )
        return session.tokenizer.decode(session.complete(request).token_ids)

    return generate


@pytest.fixture(scope="session")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_engine", ROOT / "build_engine.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command in an empty folder, the demo's files as its defaults."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> int:
        try:
            return command.main([str(a) for a in arguments])
        except SystemExit as exit_:  # argparse
            return int(exit_.code or 0)

    return call


@pytest.fixture
def refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run with bad input: exit code 2, one line, nothing left behind. Returns the line."""

    def call(*arguments: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.strip().splitlines()
        assert "Traceback" not in captured.err
        assert sorted(tmp_path.rglob("*")) == before
        assert len([line for line in lines if "error: " in line]) == 1
        return lines[-1]

    return call


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The demo's target, to be damaged."""
    return Path(shutil.copytree(DEMO / "target_nvfp4", tmp_path / "target"))
