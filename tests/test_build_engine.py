"""The build command: defaults, refusals, and what is left on disk."""

import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines import DEMO, DEMO_PROMPTS, DEMO_VOCAB, ROOT, edit_tensors
from trtree.build.engine_dir import EngineDir
from trtree.runtime.session import Session


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO / "drafter", tmp_path / "drafter"))


def test_the_demo_builds_with_every_default(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--tree-budget", 16) == 0
    assert "engines/demo" in capsys.readouterr().out
    engine = EngineDir.open(tmp_path / "engines" / "demo")
    speculative = engine.manifest["speculative_config"]
    assert (speculative["tree_budget"], speculative["verify_width"]) == (16, 17)
    assert engine.manifest["build_config"]["activations"] == "nvfp4"
    assert set(engine.manifest["files"]) == {
        "target.rank0.bin",
        "drafter.rank0.bin",
        "network.json",
        "plan.json",
        "generation_config.json",
        "tokenizer/chat_template.jinja",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "triton/trtree/1/model.py",
        "triton/trtree/config.pbtxt",
    }
    assert [p.name for p in (tmp_path / "engines").iterdir()] == ["demo"]


def test_an_existing_engine_is_kept_unless_forced(
    run: Callable[..., int],
    refused: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run() == 0
    capsys.readouterr()
    assert "engines/demo exists; pass --force" in refused()
    assert run("--force", "--tree-budget", 8) == 0
    manifest = EngineDir.open(tmp_path / "engines/demo").manifest
    assert manifest["speculative_config"]["tree_budget"] == 8
    assert [p.name for p in (tmp_path / "engines").iterdir()] == ["demo"]


def test_links_to_nothing_are_not_read(run: Callable[..., int], target: Path) -> None:
    """Hugging Face's cache is of links; a download of part of it leaves some without a file."""
    (target / "README.md").symlink_to(target / "blob")
    assert run("--checkpoint", target) == 0


def test_a_drafter_is_no_target(refused: Callable[..., str], drafter: Path) -> None:
    line = refused("--plan", "--checkpoint", drafter)
    assert f"{drafter / 'config.json'}: architecture 'DFlashDraftModel' is a drafter's" in line
    assert "give it as --drafter" in line


def test_force_replaces_engines_only(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    line = refused("--output", "precious", "--force")
    assert "no engine directory; not replacing it" in line


def test_a_static_tree_is_calibrated_and_used(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--tree", "static", "--tree-budget", 12) == 0
    session = Session(tmp_path / "engines/demo")
    tables = session.engine_dir.tree_tables()
    assert tables is not None
    choices = [tuple(path) for path in tables["medusa_choices"]]
    assert len(choices) == 12
    assert all(path[:-1] in choices for path in choices if len(path) > 1)
    assert len(tables["tree_ids"]) == len(tables["position_offsets"]) == 13

    from trtree.runtime.executor import Request

    prompt = session.tokenizer.encode("Sort, lowest first: Flur 27, Kulo 68, Clol 73.")
    outputs = [
        session.complete(
            Request(prompt, max_tokens=40, speculative=session.speculative_config(mode))
        )
        for mode in ("plain", "tree")
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].statistics.acceptance_length > 1.5


def test_plan_needs_configurations_alone(
    run: Callable[..., int], target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (target, drafter):
        (directory / "model.safetensors").unlink()
    assert run("--plan", "--checkpoint", target, "--drafter", drafter, "--tree-budget", 40) == 0
    planned = capsys.readouterr().out
    assert "41 rows" in planned
    assert run("--plan", "--tree-budget", 40) == 0
    in_place = capsys.readouterr().out
    rows = [line for line in planned.splitlines() if "weights" in line or "KV" in line]
    assert rows == [line for line in in_place.splitlines() if "weights" in line or "KV" in line]


def test_a_plan_says_of_what_and_for_what(
    run: Callable[..., int], target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine of GPUs is no CPU engine's; a drafter that is not there is missed."""
    machine = ("--hardware", ROOT / "configs" / "hardware" / "rtx_pro_6000.yaml")
    assert run("--plan", "--checkpoint", target) == 0
    alone = capsys.readouterr().out
    assert "none: plain decoding only" in alone and "--assume-drafter" in alone
    assert run("--plan", "--checkpoint", target, "--assume-drafter", *machine) == 0
    on_gpus = " ".join(capsys.readouterr().out.split())
    assert "plan for tensorrt-rtx, per rank (of 1)" in on_gpus
    assert "assumed, of the usual shape, 5 layers, block size 16" in on_gpus
    assert re.search("yes: with [0-9,]+ tokens of KV for 8 requests together", on_gpus)
    assert re.search("requests of 1,024 tokens at once .--max-batch-size [0-9]+ --max-seq", on_gpus)
    assert run("--plan", "--backend", "cpu", *machine) == 0
    assert "plan for cpu, per rank (of 1)" in capsys.readouterr().out


def test_only_plans_assume_a_drafter(refused: Callable[..., str], target: Path) -> None:
    assert "pass --plan" in refused("--checkpoint", target, "--assume-drafter")


def test_without_a_drafter_decoding_is_plain(
    run: Callable[..., int], target: Path, tmp_path: Path
) -> None:
    assert run("--checkpoint", target, "--output", "plain") == 0
    assert EngineDir.open(tmp_path / "plain").manifest["speculative_config"] is None


def test_inspect_prints_and_builds_nothing(
    run: Callable[..., int], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert run("--inspect", target) == 0
    printed = capsys.readouterr().out
    assert "Qwen3ForCausalLM: can be built" in printed and "NVFP4" in printed
    name = "model.layers.0.mlp.up_proj.weight_scale"
    edit_tensors(target, lambda tensors: tensors.pop(name))
    assert run("--inspect", target) == 2
    assert f"has no tensor {name}" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


# Bad options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": float("inf")}, "memory_gb must be a positive number, not inf"),
        ({"memory_gb": float("nan")}, "memory_gb must be a positive number, not nan"),
        ({"memory_gb": -1}, "memory_gb must be a positive number, not -1"),
        ({"gpus": 1.5}, "gpus must be a positive integer, not 1.5"),
        ({"sm": "120"}, "sm must be a positive integer, not '120'"),
        ({"name": ["a"]}, "name must be text, not ['a']"),
        ({"memory_gib": 90}, "has memory_gib; expected the keys gpus, memory_gb, name, sm"),
        ({"gpus": None}, "lacks gpus; expected the keys"),
    ],
)
def test_hardware_that_cannot_be(
    refused: Callable[..., str], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """A None: without that key."""
    machine = {"name": "a", "sm": 120, "memory_gb": 90, "gpus": 1} | change
    kept = {key: value for key, value in machine.items() if value is not None}
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump(kept))
    assert f"gpu.yaml: {message}" in refused("--plan", "--hardware", "gpu.yaml")


def test_hardware_is_for_plans(refused: Callable[..., str]) -> None:
    line = refused("--hardware", ROOT / "configs" / "hardware" / "rtx_pro_6000.yaml")
    assert "only plans are checked against it; pass --plan" in line


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tree-budget", "-1"], ["tree_budget", "-1"]),
        (["--tree-budget", "many"], ["--tree-budget", "many"]),
        (["--block-size", "9"], ["block_size 9", "drafter's 8"]),
        (["--block-size", "0"], ["block_size", "0"]),
        (["--top-k", "4096"], ["top_k 4096", str(DEMO_VOCAB)]),
        (["--page-size", "0"], ["page_size", "0"]),
        (["--attention", "plugin"], ["attention plugin", "cpu"]),
        (
            ["--attention", "plugin", "--backend", "tensorrt-rtx"],
            ["attention plugin", "tensorrt-rtx has no plugin layers"],
        ),
        (
            ["--state-snapshots", "4", "--backend", "tensorrt-rtx"],
            ["state_snapshots 4", "tensorrt-rtx", "leave it out"],
        ),
        (["--max-seq-len", "4096"], ["max_seq_len 4096", "2048"]),
        (["--max-tree-budget", "8"], ["max_tree_budget 8", "tree_budget 16"]),
        (["--max-num-rows", "32"], ["max_num_rows 32", "65"]),
        (["--activations", "int4"], ["int4"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--kv-tokens", str(10**17)], ["kv_tokens must be at most 2147483647", str(10**17)]),
        (["--max-batch-size", str(2**32)], ["max_batch_size must be at most", str(2**32)]),
        (["--tree-budget", str(2**32 + 1)], ["tree_budget must be at most", str(2**32 + 1)]),
        (["--block-size", str(2**31)], ["block_size must be at most"]),
        (["--sm", str(2**31)], ["sm must be at most"]),
        (["--kv-tokens", str(2**31 - 1)], ["kv_tokens 2147483647 in pages of page_size 16"]),
        (["--tree", "static", "--tree-budget", "0"], ["tree static", "tree_budget of 0"]),
        (["--tree", "static", "--block-size", "1"], ["tree static", "block_size of 1"]),
        (["--output", "x" * 300], ["cannot write the engine", "File name too long"]),
    ],
)
def test_bad_option(refused: Callable[..., str], arguments: list[str], parts: list[str]) -> None:
    line = refused(*arguments)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tree_budgit: 4", "unknown option tree_budgit"),
        ("tree_budget: [1]", "tree_budget must be an integer"),
        ("page_size: true", "page_size must be an integer"),
        ("- a list", "expected a mapping"),
        ("tp: 2026-99-99", "not YAML"),
        ("a: [", "not YAML"),
        ("tree: bushy", "tree must be one of dynamic, static"),
        ("checkpoint: null", "checkpoint must be a path, not None"),
        ("checkpoint: 5", "checkpoint must be a path, not 5"),
        ("drafter: []", "drafter must be a path, not []"),
        ("output: null", "output must be a path, not None"),
        ('output: "a\\0b"', "output must be a path, not 'a\\x00b'"),
        ("sm: [null]", "sm must be numbers"),
        ("sm: [89.5]", "sm must be numbers"),
        ("sm: []", "sm must be numbers"),
        ("kv_tokens: 100000000000000000", "kv_tokens must be at most"),
        ("kv_tokens: 1.0e+17", "kv_tokens must be an integer"),
    ],
)
def test_bad_configuration_file(
    refused: Callable[..., str], tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    line = refused("--config", "mine.yaml")
    assert "mine.yaml" in line
    assert part in line


def test_full_disk(tmp_path: Path) -> None:
    """The limit makes writes fail as a full disk does: an OSError in the middle of a file."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        [sys.executable, str(ROOT / "build_engine.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert "cannot write the engine" in line
    assert "target.rank0.bin" in line or "File too large" in line
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """The build is stopped as soon as its first unfinished file appears. It would go on for
    minutes, so it cannot be done before it is seen."""
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join([*DEMO_PROMPTS] * 50))
    options = ("--tree", "static", "--calibration-prompts", prompts, "--calibration-tokens", "1000")
    process = subprocess.Popen(
        [sys.executable, ROOT / "build_engine.py", "--output", "engine", *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (begun := list(tmp_path.glob(".engine.*/*"))) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert begun
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert stderr.splitlines()[-1] == "terminated"
    assert list(tmp_path.iterdir()) == [prompts]


def test_help_names_every_option_of_the_configuration_file(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    from trtree.build.options import BuildOptions

    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in BuildOptions.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_version(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("trtree 0.")
