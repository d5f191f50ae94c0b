"""Costs: measured against a clock that the engine itself moves, kept by machine, read back."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from toy_engine import ToyEngine
from trtree import _core
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.calibrate import main
from trtree.runtime.step_costs import StepCosts, load_costs, machine, measure, save_costs


class TimedEngine(ToyEngine):
    """A toy engine whose passes take known times on a clock of their own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now = 0.0
        self.others = random.Random(1)

    def clock(self) -> float:
        return self.now

    def step(self, batch: _core.RowBatch) -> _core.StepResult:
        contexts = sum(s.num_rows * s.sequence.committed_length for s in batch.segments)
        self.now += self.target_seconds(batch.num_rows) + 1e-6 * contexts
        if self.others.random() < 0.3:  # something else ran
            self.now += 0.5
        return super().step(batch)

    def commit(self, commits: Sequence[_core.Commit]) -> None:
        extended = sum(len(commit.rows) for commit in commits if commit.extend_drafter)
        self.now += 0.003 + (0.001 + 0.0005 * extended if extended else 0)
        super().commit(commits)

    def draft(self, requests: Sequence[_core.DraftRequest], top_k: int) -> _core.DraftResult:
        self.now += 0.002 + 0.001 * len(requests)
        return super().draft(requests, top_k)

    @staticmethod
    def target_seconds(rows: int) -> float:
        return 0.010 + 0.0001 * max(0, rows - 16)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"page_size": 16, "num_pages": 64},
    {"max_batch_size": 1, "verify_width": 5},
    {"num_pages": 12, "verify_width": 9},  # too few pages for the long context
    {"max_num_rows": 20, "verify_width": 17, "block_size": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_costs_are_what_the_clock_says(options: dict[str, Any]) -> None:
    engine = TimedEngine(**options)
    told: list[float] = []
    costs = measure(engine, seconds=12.0, clock=engine.clock, on_progress=told.append)
    c = engine.capabilities()
    long_enough = c.num_pages * c.page_size > 600
    sizes = [size for size, _ in costs.verify]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert max(sizes) <= c.max_num_rows
    assert max(sizes) >= min(c.verify_width - 1, c.max_num_rows)
    for rows, seconds in costs.verify:
        context = 0.0 if long_enough else 32e-6 * rows
        expected = 0.003 + engine.target_seconds(int(rows)) + context
        assert seconds == pytest.approx(expected, abs=2e-5)
    assert bool(costs.draft) == bool(costs.extend) == (c.block_size > 1)
    for rows, seconds in costs.extend:
        assert seconds == pytest.approx(0.001 + 0.0005 * rows)
    for count, seconds in costs.draft:
        assert seconds == pytest.approx(0.002 + 0.001 * count)
    per_context = 1e-6 if long_enough else 0.0
    assert costs.row_context_seconds == pytest.approx(per_context, rel=1e-6)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert costs.model().verify_seconds(16, 32) == pytest.approx(0.013512, rel=1e-3)


def test_sizes_that_there_is_no_time_for_are_left_out() -> None:
    engine = TimedEngine()
    costs = measure(engine, seconds=0.2, clock=engine.clock)
    assert costs.verify[0][0] == 1
    assert 2 <= len(costs.verify) < 8
    assert len(costs.draft) >= 2
    assert engine.now < 15


@pytest.fixture
def engine(demo_engine: Callable[..., Path], tmp_path: Path) -> EngineDir:
    return EngineDir.open(Path(shutil.copytree(demo_engine(), tmp_path / "engine")))


COSTS = StepCosts([(1.0, 0.5), (8.0, 0.75)], [(1.0, 0.25)], 1e-6, [(1.0, 0.125)])


def test_costs_are_kept_by_machine(engine: EngineDir) -> None:
    said: list[str] = []
    assert load_costs(engine, 3, say=said.append) is None
    assert said == []  # nothing was measured, nothing is ignored
    save_costs(engine, COSTS, 3)
    save_costs(engine, StepCosts([(1.0, 9.0)], [], 0.0, []), 4)
    assert load_costs(engine, 3) == COSTS
    better = StepCosts([(1.0, 0.125)], [], 0.0, [])
    save_costs(engine, better, 3)
    assert load_costs(engine, 3) == better
    assert len(engine.calibration()["costs"]) == 2
    EngineDir.open(engine.path)  # the calibration is no part of what is hashed
    assert said == []


@pytest.mark.parametrize(
    ("key", "value"), [("processor", "another"), ("threads", "64"), ("engine", "0" * 64)]
)
def test_costs_of_another_machine_are_ignored_with_a_line(
    engine: EngineDir, key: str, value: str
) -> None:
    save_costs(engine, COSTS)
    calibration = engine.calibration()
    calibration["costs"][0]["machine"][key] = value
    engine.write_calibration(calibration)
    said: list[str] = []
    assert load_costs(engine, say=said.append) is None
    (line,) = said
    assert f"{key} {value!r:.60}, here {machine(engine)[key]!r:.60}" in line
    assert "ignoring" in line
    assert f"trtree.runtime.calibrate --engine {engine.path}" in line


@pytest.mark.parametrize(
    "damage",
    [
        "not json",
        "[]",
        '{"costs": 3}',
        '{"costs": [{"machine": 1}]}',
        {"verify": "x"},
        {"verify": [[1, -1]]},
        {"verify": [[2, 1], [1, 1]]},
        {"draft": None},
    ],
)
def test_a_damaged_calibration_is_refused_by_name(engine: EngineDir, damage: Any) -> None:
    file = save_costs(engine, COSTS)
    if isinstance(damage, dict):
        calibration = engine.calibration()
        calibration["costs"][0] |= damage
        damage = json.dumps(calibration)
    file.write_text(damage)
    with pytest.raises(EngineDirError, match="delete it and calibrate again") as error:
        load_costs(engine)
    assert str(engine.path) in str(error.value)


def test_the_command_measures_and_keeps(
    engine: EngineDir, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--engine", str(engine.path), "--seconds", "0.5", "--threads", "1"]) == 0
    out, err = capfd.readouterr()
    assert err == ""  # quiet in a pipe
    assert "target pass, ms by rows: 1: " in out
    assert str(engine.path / "calibration.json") in out
    costs = load_costs(engine, 1)
    assert costs is not None
    model = costs.model()
    assert 0 < model.verify_seconds(1) <= model.verify_seconds(64)
    assert model.draft_seconds(1) > 0
    assert not list(engine.path.glob(".calibration*"))


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtree.runtime.calibrate", "--engine", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
