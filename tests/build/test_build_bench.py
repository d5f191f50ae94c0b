"""The build benchmark on a model of a few thousand parameters."""

import json
from pathlib import Path

import pytest

from engines import tiny_config
from trtree.build.bench.__main__ import main


def test_a_random_checkpoint_is_built_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config(head_dim=64)))
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    sidecar = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (model / "hf_quant_config.json").write_text(json.dumps(sidecar))
    work = tmp_path / "work"
    work.mkdir()
    arguments = ["--model", str(model), "--work", str(work), "--max-seq-len", "128"]
    assert main(["build", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["activations"] == "nvfp4"
    assert result["engine_bytes"] > 1_000_000
    assert result["peak_anonymous_bytes"] > 0
    assert result["seconds"] > 0
    assert result["weight_rewrites"] == {"target.rank0.engine": []}
    assert list(work.iterdir()) == []
