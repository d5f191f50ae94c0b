"""The GPU benchmark's CPU side: what it compares, counts and refuses."""

import argparse
from pathlib import Path

import pytest
import torch

from trtree.plugins.ddtree import device
from trtree.runtime.bench import __main__ as bench
from trtree.runtime.bench import gpu
from trtree.runtime.bench.gpu import AttentionStep, Shape


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_sdpa_computes_what_the_kernels_do(fp8_kv: bool) -> None:
    """Otherwise their times could not be compared."""
    torch.manual_seed(0)
    shape = Shape(2, 5, 70, fp8_kv, kv_heads=2, group=3, head_dim=64, page_size=16)
    step = AttentionStep(shape, torch.device("cpu"))
    ours = step.attend().reshape(2, 5, 6, 64).transpose(1, 2)
    for name, call in step.sdpa_layouts():
        theirs = call().reshape(2, 6, 5, 64)
        torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.01, msg=name)


def test_bytes_of_a_step() -> None:
    shape = Shape(3, 17, 1000)
    keys = 2 * (1000 + 17) * 8 * 128
    q_and_out = 2 * 17 * 32 * 128 * 2
    assert shape.bytes_moved() == 3 * (2 * keys + q_and_out)
    assert Shape(3, 17, 1000, fp8_kv=True).bytes_moved() == 3 * (keys + q_and_out)


def test_options() -> None:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    args = parser.parse_args(["--seconds", "60", "--output", "x.json"])
    assert (args.seconds, args.output) == (60, Path("x.json"))
    assert parser.parse_args([]).seconds < 8 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without a GPU")
def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench.main(["gpu", "--output", str(tmp_path / "x.json")])
    assert not (tmp_path / "x.json").exists()


def test_trees_and_walks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself, interpreted on a small vocabulary; a wrong walk is told."""
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(gpu, "TREE_WIDTHS", (17,))
    monkeypatch.setattr(gpu, "tree_logits", lambda: logits)
    assert gpu.check_trees() == {"17": "equal"}
    monkeypatch.setattr(device, "walk_trees", lambda trees, choices, walks: None)
    assert gpu.check_trees() == {"17": "DIFFERENT"}
