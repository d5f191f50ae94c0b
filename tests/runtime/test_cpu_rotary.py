"""Rotary embedding on the CPU engine in the forms that no family here has yet."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import build_demo
from implied_weights import ImpliedWeights
from steps import prefill
from trtree import _core
from trtree.build.engine_dir import MANIFEST, EngineDir, sha256
from trtree.build.lowering.reference import ReferenceNetwork, StepContext
from trtree.build.network.graph import Graph
from trtree.build.network.rope import RopeTable
from trtree.runtime.engines import load_engine


def with_rope(path: Path, change: dict[str, Any]) -> EngineDir:
    """The engine with every RoPE table of its plan changed."""
    plan = json.loads((path / "plan.json").read_text())
    for rope in plan["ropes"]:
        rope.update(change)
    (path / "plan.json").write_text(json.dumps(plan))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["plan.json"] = {
        "bytes": (path / "plan.json").stat().st_size,
        "sha256": sha256(path / "plan.json"),
    }
    (path / MANIFEST).write_text(json.dumps(manifest))
    return EngineDir.open(path)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 64])
def test_interleaved_and_partial(tmp_path: Path, interleaved: bool, rotary: int) -> None:
    inv_freq = [10000.0 ** (-2 * i / rotary) for i in range(rotary // 2)]
    change = {"inv_freq": inv_freq, "interleaved": interleaved, "scaling": 1.25}
    engine: Any = load_engine(with_rope(build_demo(tmp_path / "engine"), change))
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def observe(network: str, op: str, inputs: list[Any], outputs: list[Any]) -> None:
        if network == "target" and op.endswith("q_rotated"):
            seen.append((inputs[0], outputs[0]))

    engine.observe(observe)
    prefill(engine, _core.Sequence(1, 0, 0, [0, 1, 2]), list(range(40, 80)))
    engine.observe(None)

    g = Graph("target", ImpliedWeights())
    x = g.input("x", ("rows", 4, 64), "float32")
    positions = g.input("positions", ("rows",), "int32")
    table = RopeTable("rope", tuple(inv_freq), 1.25, interleaved)
    g.output("y", g.rotary_embedding("rotated", x, positions, table))
    reference = ReferenceNetwork(g.network, {}, {})
    assert len(seen) == 6  # layers
    for given, got in seen:
        inputs = {
            "x": torch.tensor(given).reshape(-1, 4, 64),
            "positions": torch.arange(40, dtype=torch.int32),
        }
        expected = reference.run(inputs, StepContext({}, []))["y"].reshape(40, -1).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
