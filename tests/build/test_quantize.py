"""Calibrated quantization with ModelOpt, from a plain checkpoint to tokens."""

import logging
from pathlib import Path

import pytest

from engines import DEMO, random_checkpoint, tiny_config
from random_moe import qwen3_moe_config
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint
from trtree.build.options import BuildOptions
from trtree.build.quantize import main
from trtree.runtime.executor import Request
from trtree.runtime.session import Session


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "plain", tiny_config(tie_word_embeddings=True))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("1 2 3 4 5 6 7 8\n\n11 12 13 14 15\n")
    return file


@pytest.mark.parametrize(
    ("algorithm", "kv_cache", "activations"),
    [
        ("NVFP4", "FP8", "nvfp4"),
        ("W4A16_NVFP4", None, "bf16"),
        ("NVFP4_AWQ", None, "nvfp4"),
        ("NVFP4_SVD", None, "nvfp4"),
        ("FP8", None, "none"),
    ],
)
def test_a_quantized_checkpoint_decodes(
    plain: Path,
    prompts: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    kv_cache: str | None,
    activations: str,
) -> None:
    output = tmp_path / "quantized"
    arguments = ["--checkpoint", plain, "--output", output, "--prompts", prompts]
    arguments += ["--algorithm", algorithm]
    if kv_cache:
        arguments += ["--kv-cache", kv_cache]
    with caplog.at_level(logging.ERROR):
        assert main([str(a) for a in arguments]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "prompts.txt", "quantized"]
    checkpoint = Checkpoint.open(output)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.algorithm == algorithm
    scales = checkpoint.kv_scales()
    assert len(scales) == (4 if kv_cache else 0)
    description = builder.describe(BuildOptions(checkpoint=output, output=tmp_path / "engine"))
    assert description.activations == activations
    session = Session(builder.write(description))
    states = session.engine_dir.plan()["states"]
    used = [scale for state in states for scale in (state["k_scale"], state["v_scale"])]
    assert used == list(scales.values() or [1.0] * 4)
    assert {state["dtype"] for state in states} == {"float8_e4m3fn" if kv_cache else "float32"}
    speculative = session.speculative_config("plain")
    done = session.complete(Request([1, 2, 3], max_tokens=8, speculative=speculative))
    assert len(done.token_ids) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--checkpoint": DEMO / "target_nvfp4"}, "is quantized already (NVFP4)"),
        ({"--prompts": "nowhere"}, "--prompts nowhere: cannot be read"),
        ({"--output": "plain"}, "plain exists; give another --output"),
    ],
)
def test_bad_input_is_one_line(
    plain: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = {"--checkpoint": plain, "--output": "quantized", "--prompts": prompts} | change
    assert main([str(part) for pair in arguments.items() for part in pair]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and message in lines[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_scales_of_stacked_experts_are_not_searched(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = random_checkpoint(tmp_path / "experts", qwen3_moe_config())
    arguments = ["--checkpoint", checkpoint, "--output", tmp_path / "out", "--prompts", prompts]
    assert main([*map(str, arguments), "--algorithm", "NVFP4_AWQ"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "model.layers.1.mlp.experts.gate_up_proj is one tensor for all of a layer" in line
    assert not (tmp_path / "out").exists()
