"""The kernels of latent attention and its indexer, compiled ahead of time in a process whose
kernels are not interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtree.plugins.tree_attention.tiles import SHARED_LIMIT

NAMES = {
    "index_scores",
    "index_top_k",
    "latent_append",
    "latent_combine",
    "latent_combine_selected",
    "latent_commit",
    "latent_tree_attention",
    "latent_tree_attention_selected",
}


def report(*args: str, cache: Path) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "trtree.plugins.mla_attention.report", "--json", *args]
    done = subprocess.run(
        [*command, "--cache", str(cache)], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels: list[dict[str, Any]] = json.loads(done.stdout)["kernels"]
    return kernels


def assert_fits(kernels: list[dict[str, Any]]) -> None:
    assert {row["name"] for row in kernels} == NAMES
    for row in kernels:
        assert row["shared_limit"] == SHARED_LIMIT[row["sm"]]
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert 16 <= row["registers"] <= 255, row
        assert row["spills"] == 0, row


def test_glm_5_on_eight_ranks_fits_sm120(tmp_path: Path) -> None:
    kernels = report("--sm", "120", "--heads", "8", cache=tmp_path)
    assert_fits(kernels)
    # Latents in flight, or there is no pipeline.
    attention = [row for row in kernels if row["name"].startswith("latent_tree_attention")]
    assert all(row["shared_bytes"] > 40_000 for row in attention)


@pytest.mark.full
def test_every_kernel_fits_every_sm(tmp_path: Path) -> None:
    kernels = report(cache=tmp_path)
    assert_fits(kernels)
    assert {row["sm"] for row in kernels} == {80, 89, 90, 100, 120}
    assert {row["heads"] for row in kernels} == {64, 8, None}
