"""Kernels compiled ahead of time: resources, the cache, barriers, refusals.

Compilation needs a process whose kernels are not interpreted.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtree.plugins.tree_attention.aot import KernelCompileError, KernelSpec, compile_kernel
from trtree.plugins.tree_attention.tiles import SHARED_LIMIT, attention_tile, require_fp8

SUPPORT = Path(__file__).parents[2] / "support"
FIELDS = ["name", "sm", "head_dim", "registers", "shared_bytes", "shared_limit", "spills"]
ATTENTION = {
    "tree_kv_append",
    "tree_attention",
    "tree_attention_window",
    "tree_attention_combine",
    "tree_kv_commit",
    "tree_kv_append_fp8",
    "tree_attention_fp8",
    "tree_kv_commit_fp8",
}
TREE = {
    "ddtree_top_k_chunks",
    "ddtree_top_k_merge",
    "ddtree_build_tree_17",
    "ddtree_build_tree_2048",
    "ddtree_walk_tree_17",
    "ddtree_walk_tree_2048",
}


def python(*args: str, cache: Path) -> str:
    """A process that compiles; what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRTREE_KERNEL_CACHE": str(cache), "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(*args: str, cache: Path) -> list[dict[str, Any]]:
    text = python("-m", "trtree.plugins.tree_attention.report", "--json", *args, cache=cache)
    result: dict[str, list[dict[str, Any]]] = json.loads(text)
    assert list(result) == ["kernels"]
    return result["kernels"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def sm120(cache: Path) -> list[dict[str, Any]]:
    return report("--sm", "120", "--head-dim", "128", cache=cache)


def assert_fits(kernels: list[dict[str, Any]]) -> None:
    for row in kernels:
        assert list(row) == FIELDS
        assert row["shared_limit"] == SHARED_LIMIT[row["sm"]]
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert 8 <= row["registers"] <= 255, row


def test_sm120_head_128_fits_without_spills(sm120: list[dict[str, Any]]) -> None:
    assert {row["name"] for row in sm120} == ATTENTION | TREE
    assert_fits(sm120)
    assert [row for row in sm120 if row["spills"]] == []
    assert {row["head_dim"] for row in sm120 if row["name"] in ATTENTION} == {128}
    # K and V tiles in flight, or there is no pipeline.
    assert all(row["shared_bytes"] > 0 for row in sm120 if row["name"] == "tree_attention")


@pytest.mark.full
def test_every_kernel_fits_every_sm(tmp_path: Path) -> None:
    kernels = report(cache=tmp_path)
    assert_fits(kernels)
    assert {row["sm"] for row in kernels} == {80, 89, 90, 100, 120}
    assert {row["head_dim"] for row in kernels} == {64, 128, 192, 256, None}
    assert {row["name"] for row in kernels if row["sm"] == 80} == {
        name for name in ATTENTION | TREE if not name.endswith("fp8")
    }
    assert [row for row in kernels if row["spills"]] == []


def test_kernels_are_cached_by_content(cache: Path, sm120: list[dict[str, Any]]) -> None:
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(before) == len(sm120)
    assert report("--sm", "120", "--head-dim", "128", cache=cache) == sm120
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before
    files = sorted(path.name for path in next(iter(before)).iterdir())
    assert files == ["kernel.cubin", "kernel.json", "kernel.ptx"]


def test_compiled_kernels_take_their_own_arguments_alone(
    cache: Path, sm120: list[dict[str, Any]]
) -> None:
    """Triton's two scratch pointers are gone, and so are this machine's paths."""
    for folder in cache.iterdir():
        ptx = (folder / "kernel.ptx").read_text()
        entry = json.loads((folder / "kernel.json").read_text())["entry"]
        arguments = re.search(rf"\.entry {entry}\((.*?)\)", ptx, re.DOTALL)
        assert arguments is not None
        if entry == "tree_attention_kernel":
            assert arguments.group(1).count(".param") == 13
            assert "cp.async" in ptx
        if entry == "tree_kv_commit_kernel":
            assert arguments.group(1).count(".param") == 7
        assert ".file" not in ptx
        assert (folder / "kernel.cubin").read_bytes()[:4] == b"\x7fELF"


PRINT_PTX = """
import sys
from dataclasses import replace
from pathlib import Path
from planted import plant
from trtree.plugins.ddtree import device_tree
from trtree.plugins.tree_attention import specs
from trtree.plugins.tree_attention.aot import compile_kernel
from trtree.plugins.tree_attention.kernels import commit
layer = specs.LayerConfig(128, 8, 4, 64, 17, 1.0, 128)
for spec, module in ((specs.commit_spec(layer), commit), (specs.build_tree_spec(17), device_tree)):
    print(compile_kernel(spec, 120).ptx + "%%%%")
    source = Path(module.__file__).read_text()
    text = "tl.debug_barrier()"
    tail = source[source.rindex(text) - 80:]
    passage = tail[: tail.index(text) + len(text)]
    faulty = plant(module, passage, passage.replace(text, "pass"), Path(sys.argv[1]))
    kernel = getattr(faulty, spec.kernel.__name__)
    print(compile_kernel(replace(spec, kernel=kernel), 120).ptx + "%%%%")
"""


def accesses(ptx: str) -> Iterator[str]:
    for line in ptx.splitlines():
        if found := re.search(r"(ld\.global|st\.global|bar\.sync)", line):
            yield found.group(1)


def reads_before_writes(ptx: str) -> bool:
    """A barrier stands between the last load of the moved rows and the first store."""
    kinds = list(accesses(ptx))
    first_store = kinds.index("st.global")
    return kinds[first_store - 1] == "bar.sync" and "ld.global" not in kinds[first_store:]


def parents_before_walk(ptx: str) -> bool:
    """A barrier stands behind the search's last store, before the walk loads parents."""
    kinds = list(accesses(ptx))
    last_load = len(kinds) - 1 - kinds[::-1].index("ld.global")
    return kinds[last_load - 1] == "bar.sync"


def test_a_missing_barrier_is_caught(tmp_path: Path) -> None:
    """The interpreter runs one thread and cannot see it; the compiled code shows it."""
    script = tmp_path / "print_ptx.py"
    script.write_text(PRINT_PTX)
    commit, bad_commit, tree, bad_tree, _ = python(
        str(script), str(tmp_path), cache=tmp_path / "kernels"
    ).split("%%%%")
    assert reads_before_writes(commit)
    assert not reads_before_writes(bad_commit)
    assert parents_before_walk(tree)
    assert not parents_before_walk(bad_tree)


def test_an_interpreting_process_cannot_compile() -> None:
    with pytest.raises(KernelCompileError, match="unset TRITON_INTERPRET"):
        compile_kernel(KernelSpec("x", print, {}, {}), 120)


TOO_LARGE = """
from dataclasses import replace
from trtree.plugins.tree_attention import specs
from trtree.plugins.tree_attention.aot import KernelCompileError, compile_kernel
layer = specs.LayerConfig(256, 8, 4, 64, 17, 1.0, 256)
try:
    compile_kernel(replace(specs.attention_spec(layer, 120), num_stages=6), 120)
except KernelCompileError as error:
    print(error)
"""


def test_shared_memory_beyond_the_sm_is_refused(tmp_path: Path) -> None:
    message = python("-c", TOO_LARGE, cache=tmp_path)
    assert re.search(r"takes \d+ bytes of shared memory, the SM has 101376", message)


def test_fp8_is_refused_by_name_where_the_sm_lacks_it() -> None:
    require_fp8(89)
    with pytest.raises(ValueError, match=r"FP8 .* needs SM 89 or newer, this is SM 80"):
        require_fp8(80)


@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "block_m"),
    [(1, 1, 128, 16), (17, 4, 128, 128), (17, 1, 64, 32), (129, 8, 128, 128), (17, 4, 256, 64)],
)
def test_a_tile_holds_a_trees_rows_if_registers_allow(
    rows: int, group: int, head_dim: int, block_m: int
) -> None:
    assert attention_tile(120, head_dim, rows, group).block_m == block_m


def test_an_unknown_sm_is_refused() -> None:
    with pytest.raises(ValueError, match="SM 75"):
        attention_tile(75, 128, 17, 4)
