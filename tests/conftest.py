"""Shared fixtures: the demo engine in its variants, built once per session."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Triton decides at its import; tests run its kernels on the CPU.
os.environ["TRITON_INTERPRET"] = "1"

import torch

# Helper modules beside the tests.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from engines import build_demo
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
