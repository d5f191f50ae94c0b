"""Quantizing a plain checkpoint while building."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engines import random_checkpoint, tiny_config
from trtree.build.engine_dir import EngineDir
from trtree.runtime.executor import Request
from trtree.runtime.session import Session


def test_a_plain_pair_is_quantized_on_request(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_checkpoint(tmp_path / "plain", tiny_config(tie_word_embeddings=True))
    arguments = ("--checkpoint", tmp_path / "plain", "--quantize", "nvfp4")
    assert run(*arguments, "--output", "made") == 0
    manifest = EngineDir.open(tmp_path / "made").manifest
    assert manifest["build_config"]["activations"] == "bf16"
    assert manifest["build_config"]["quantization"] == {
        "target": {"algorithm": "W4A16_NVFP4", "by": "builder", "kv_cache": None}
    }
    built = [line for line in capsys.readouterr().out.splitlines() if "weights" in line]
    assert run(*arguments, "--plan") == 0
    planned = capsys.readouterr().out
    assert built and all(line.strip() in planned for line in built)
    assert run("--checkpoint", tmp_path / "plain", "--plan") == 0
    assert not any(line.strip() in capsys.readouterr().out for line in built)


def test_a_quantized_drafter_proposes_nearly_as_well(
    demo_session: Callable[..., Session],
) -> None:
    lengths, tokens = [], []
    for options in ({}, {"quantize_drafter": "nvfp4"}):
        session = demo_session(**options)
        request = Request(
            session.tokenizer.encode("Permission is hereby granted, free of charge,"),
            max_tokens=96,
            speculative=session.speculative_config("tree", 16),
        )
        done = session.complete(request)
        tokens.append(done.token_ids)
        lengths.append(done.statistics.acceptance_length)
    assert tokens[0] == tokens[1]
    assert lengths[1] > 0.85 * lengths[0] > 2


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_a_checkpoint_is_not_quantized_twice(refused: Callable[..., str], plan: list[str]) -> None:
    line = refused("--quantize", "nvfp4", *plan)
    assert "target_nvfp4: is quantized already (NVFP4)" in line
