"""Checkpoints damaged at random: whatever is wrong is one line and exit code 2, or does no harm."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import random_checkpoint, tiny_config
from fp8_blocks import stored_in_blocks, write_in_blocks
from random_moe import glm4_moe_config, qwen3_moe_config, random_moe

StateDict = dict[str, torch.Tensor]
SIDECAR = "hf_quant_config.json"
KINDS = ("fp8-blocks", "awq", "svd", "svd-experts")
VALUES = [None, -1, 0, 3, 1e30, "x", "", [], [1], ["a"], {}, {"a": 1}, True, 10**12, "NVFP4", 128]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]
NUMBERS = [float("nan"), float("inf"), 0.0, -1.0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    experts = glm4_moe_config()
    blocks = qwen3_moe_config(hidden_size=192, moe_intermediate_size=160)
    stored = stored_in_blocks(random_moe(blocks, dtype=torch.bfloat16))
    return {
        "fp8-blocks": write_in_blocks(root / "fp8-blocks", stored, blocks),
        "awq": random_checkpoint(root / "awq", experts, algorithm="NVFP4_AWQ"),
        "svd": random_checkpoint(root / "svd", tiny_config(), algorithm="NVFP4_SVD"),
        "svd-experts": random_checkpoint(root / "svd-experts", experts, algorithm="NVFP4_SVD"),
    }


def damage_tensor(rng: random.Random, tensors: StateDict) -> str:
    """Of linears, mostly. Returns what was done."""
    linears = [name for name in sorted(tensors) if "_proj." in name]
    name = rng.choice(linears if rng.random() < 0.8 else sorted(tensors))
    tensor = tensors[name]
    wide = tensor if tensor.dtype == torch.uint8 else tensor.float()
    changes: dict[str, Callable[[], torch.Tensor]] = {
        "other type": lambda: wide.to(rng.choice(DTYPES)),
        "flat": lambda: tensor.reshape(-1),
        "another axis": lambda: tensor[None],
        "cut": lambda: tensor[: tensor.shape[0] // 2] if tensor.ndim else tensor.repeat(2),
        "narrow": lambda: tensor[..., :-1] if tensor.ndim else tensor,
        "empty": lambda: tensor.reshape(-1)[:0],
        "number": lambda: torch.full(tensor.shape, rng.choice(NUMBERS)).to(tensor.dtype),
        "other's": lambda: tensors[rng.choice(linears)],
    }
    done = rng.choice(["gone", "renamed", *changes])
    if done == "gone":
        del tensors[name]
    elif done == "renamed":
        tensors[name + rng.choice([".weight", "_scale", "_inv"])] = tensors.pop(name)
    else:
        tensors[name] = changes[done]().clone().contiguous()
    return f"{name}: {done}"


def damage_json(rng: random.Random, data: Any) -> str:
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in pairs:
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(data)
    node, key = rng.choice(places)
    if rng.random() < 0.3:
        del node[key]
        return f"{key}: gone"
    node[key] = rng.choice(VALUES)
    return f"{key}: {node[key]!r}"


def damaged(rng: random.Random, whole: Path, directory: Path) -> str:
    """A copy with one or two things wrong. Returns what they are."""
    shutil.copytree(whole, directory)
    tensors = load_file(directory / "model.safetensors")
    files = {name: directory / name for name in ("config.json", SIDECAR)}
    files = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    done = []
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.65:
            done.append(damage_tensor(rng, tensors))
        else:
            done.append(damage_json(rng, files[rng.choice(sorted(files))]))
    save_file(tensors, directory / "model.safetensors")
    for name, data in files.items():
        (directory / name).write_text(json.dumps(data))
    return "; ".join(done)


def check(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    whole: Path,
    seeds: range,
    folder: Path,
) -> int:
    """Returns how many were refused."""
    refused = 0
    for seed in seeds:
        directory = folder / f"checkpoint{seed}"
        done = damaged(random.Random(seed), whole, directory)
        output = folder / f"engine{seed}"
        for command in (
            ["--inspect", directory],
            ["--checkpoint", directory, "--output", output, "--backend", "cpu", "--force"],
        ):
            status = run(*command)
            said = capsys.readouterr().err
            assert status in (0, 2), (seed, done, said)
            assert "Traceback" not in said, (seed, done)
            if status == 2:
                assert any(word in said for word in ("error: ", "problem: ")), (seed, done)
        assert output.exists() == (status == 0), (seed, done)
        refused += status == 2
        shutil.rmtree(directory)
        shutil.rmtree(output, ignore_errors=True)
    return refused


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_one_line(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    whole: dict[str, Path],
    tmp_path: Path,
    kind: str,
) -> None:
    assert check(run, capsys, whole[kind], range(8), tmp_path) > 2


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_much_bad_input(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    whole: dict[str, Path],
    tmp_path: Path,
    kind: str,
) -> None:
    check(run, capsys, whole[kind], range(1000, 1200), tmp_path)
