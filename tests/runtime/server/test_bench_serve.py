"""The load benchmark, on a server that runs."""

import json
from pathlib import Path

import pytest

from engines import DEMO_PROMPTS
from server import ServerProcess
from trtree.runtime.bench.__main__ import main


def test_figures(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(DEMO_PROMPTS[:2]))
    (before,) = server.metrics("target_forwards_total")
    arguments = ["--url", server.url, "--prompts", str(prompts), "--max-tokens", "20"]
    small = ["--clients", "1", "3", "--turns", "1", "--modes", "plain", "tree"]
    small += ["--tree-budgets", "2", "8"]
    assert main(["serve", *arguments, *small]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    told = captured.err.splitlines()  # as it came
    assert [line.partition(":")[0] for line in told] == [
        f"{clients} clients, {mode}" for clients in (1, 3) for mode in ("plain", "tree 2", "tree 8")
    ]
    assert [(row["mode"], row["clients"]) for row in result["rows"]] == [
        (mode, clients) for clients in (1, 3) for mode in ("plain", "tree 2", "tree 8")
    ]
    for row in result["rows"]:
        assert (row["acceptance_length"] == 1) == (row["mode"] == "plain")
        assert row["tokens_per_s"] > 0
        assert (row["over_plain"] == 1) == (row["mode"] == "plain")
        for name in ("time_to_first_token_ms", "time_per_output_token_ms", "gap_ms"):
            assert 0 <= row[name]["p50"] <= row[name]["p90"] <= row[name]["p99"]
    length = {row["mode"]: row["acceptance_length"] for row in result["rows"]}
    assert length["tree 2"] < length["tree 8"]
    assert server.metrics("target_forwards_total") > [before]


def test_no_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a")
    arguments = ["--url", "http://127.0.0.1:9", "--prompts", str(tmp_path / "p.txt")]
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "127.0.0.1:9" in line
