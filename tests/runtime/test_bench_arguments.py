"""Bad input to the benchmarks: one line, exit code 2."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engines import ROOT
from trtree.build.bench.__main__ import main as build_main
from trtree.runtime.bench.__main__ import main

DEMO_CONFIG = str(ROOT / "configs" / "demo.yaml")


@pytest.mark.parametrize(
    ("command", "arguments", "part"),
    [
        (main, ["decode", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (main, ["decode", "--config", DEMO_CONFIG, "--prompts", "nowhere.txt"], "nowhere.txt"),
        (build_main, ["build", "--model", "nowhere"], "nowhere"),
        (build_main, ["build", "--sm", "many"], "sm must be numbers"),
    ],
)
def test_bad_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[Sequence[str]], int],
    arguments: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert part in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["decode", "--repeats", "0"],
        ["decode", "--max-tokens", "-1"],
        ["linear", "--repeats", "0"],
        ["linear", "--rows", "0"],
        ["linear", "--threads", "1000000"],
        ["linear", "--isa", "sse"],
        ["experts", "--rows", "0"],
        ["tree", "--seed", "-1"],
    ],
)
def test_bad_numbers(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert f"argument {arguments[1]}: " in capsys.readouterr().err.splitlines()[-1]
