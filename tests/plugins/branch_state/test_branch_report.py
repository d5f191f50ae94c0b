"""The kernels compiled ahead of time: resources on every SM, and a barrier.

Compilation needs a process whose kernels are not interpreted.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtree.plugins.gated_delta_net.specs import DeltaConfig

SUPPORT = Path(__file__).parents[2] / "support"
NAMES = {
    "gated_delta_decay",
    "gated_delta_net",
    "gated_delta_commit",
    "causal_conv",
    "causal_conv_commit",
}


def python(*args: str, cache: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRTREE_KERNEL_CACHE": str(cache), "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(*args: str, cache: Path) -> list[dict[str, Any]]:
    text = python("-m", "trtree.plugins.branch_report", "--json", *args, cache=cache)
    kernels: list[dict[str, Any]] = json.loads(text)["kernels"]
    for row in kernels:
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert 16 <= row["registers"] <= 255, row
    return kernels


def test_sm120_fits_without_spills(tmp_path: Path) -> None:
    kernels = report("--sm", "120", "--head-dim", "128", cache=tmp_path)
    assert {row["name"] for row in kernels} == NAMES
    assert [row for row in kernels if row["spills"]] == []
    texts = {
        json.loads((folder / "kernel.json").read_text())["entry"]: folder / "kernel.ptx"
        for folder in tmp_path.iterdir()
    }
    assert waits_behind_updates(texts["gated_delta_net_kernel"].read_text())


@pytest.mark.full
def test_every_kernel_fits_every_sm(tmp_path: Path) -> None:
    kernels = report(cache=tmp_path)
    assert {row["sm"] for row in kernels} == {80, 89, 90, 100, 120}
    assert {row["head_dim"] for row in kernels} == {64, 128, 256, None}
    assert [row for row in kernels if row["spills"]] == []


def waits_behind_updates(ptx: str) -> bool:
    """A barrier is what comes next behind the stores of a block of rows, before a branch leads
    to the next block, which may load them."""
    kinds = re.findall(r"(st\.global|bar\.sync|ld\.global|bra\b)", ptx)
    last = len(kinds) - 1 - kinds[::-1].index("st.global")
    return kinds[last + 1] == "bar.sync"


PRINT_PTX = """
import sys
from dataclasses import replace
from pathlib import Path
from planted import plant
from trtree.plugins.gated_delta_net import specs
from trtree.plugins.gated_delta_net.kernels import delta
from trtree.plugins.tree_attention.aot import compile_kernel
faulty = plant(delta, "tl.debug_barrier()", "pass", Path(sys.argv[1]))
spec = specs.delta_spec(specs.DeltaConfig(64, 64, 4, 2), 120)
print(compile_kernel(replace(spec, kernel=faulty.gated_delta_net_kernel), 120).ptx)
"""


@pytest.mark.full
def test_a_missing_barrier_is_caught(tmp_path: Path) -> None:
    """The interpreter runs one thread and cannot see it; the compiled code shows it."""
    script = tmp_path / "print_ptx.py"
    script.write_text(PRINT_PTX)
    assert not waits_behind_updates(python(str(script), str(tmp_path), cache=tmp_path / "kernels"))


def test_other_head_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="value_dim 96: gated_delta_net's kernels take 64, 128, 2"):
        DeltaConfig(64, 96, 4, 2)
