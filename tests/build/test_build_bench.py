"""The benchmarks on a model of a few thousand parameters."""

import argparse
import json
from pathlib import Path

import pytest

from engines import tiny_config
from trtree.build.bench.__main__ import main
from trtree.build.bench.convert import size


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A configuration without weights."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config(head_dim=64)))
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    sidecar = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (model / "hf_quant_config.json").write_text(json.dumps(sidecar))
    return model


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


def test_a_random_checkpoint_is_built_and_measured(
    model: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model), "--work", str(work), "--max-seq-len", "128"]
    assert main(["build", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["activations"] == "nvfp4"
    assert result["engine_bytes"] > 1_000_000
    assert result["peak_anonymous_bytes"] > 0
    assert result["seconds"] > 0
    assert result["weight_rewrites"] == {"target.rank0.engine": []}
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--plain"], ["--tp", "2"]])
def test_a_conversion_is_measured(
    model: Path, work: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    arguments = ["--model", str(model), "--work", str(work), "--size", "2MB", *options]
    assert main(["convert", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 1_900_000 < result["checkpoint_bytes"] < 2_300_000
    assert result["layers"] > 5
    ratio = result["engine_bytes"] / result["checkpoint_bytes"]
    assert ratio < 0.5 if "--plain" in options else 0.9 < ratio < 1.2
    assert min(result[f"{rate}_mb_per_s"] for rate in ("engine", "disk", "copy")) > 0
    assert (
        0
        < result["of_copy"]
        == pytest.approx(result["engine_mb_per_s"] / result["copy_mb_per_s"], rel=0.1)
    )
    assert list(work.iterdir()) == []


def test_a_killed_conversion_is_resumed(
    model: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model), "--work", str(work), "--size", "3MB", "--kill-at", "0.5"]
    assert main(["convert", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["kept_bytes"] < result["engine_bytes"]
    assert result["discarded_bytes"] >= 0
    assert result["peak_anonymous_bytes"] < 32 << 20  # no more than a few pieces of the file
    assert result["written_bytes"] == result["engine_bytes"] - result["kept_bytes"]
    assert list(work.iterdir()) == []


def test_a_size_the_disk_cannot_hold_is_refused(
    model: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "--model", str(model), "--work", str(work), "--size", "900TB"]) == 2
    assert "GB are free; give a smaller size" in capsys.readouterr().err
    assert list(work.iterdir()) == []


def test_sizes() -> None:
    assert [size(text) for text in ("30GB", "1.5 G", "200m", "7")] == [
        30 * 10**9,
        1_500_000_000,
        200_000_000,
        7,
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="'30XB' is no size"):
        size("30XB")
