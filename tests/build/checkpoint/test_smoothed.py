"""Vectors that inputs are multiplied by (AWQ), and low-rank factors (SVDQuant): what is wrong
with them is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import random_checkpoint, tiny_config
from random_moe import glm4_moe_config
from trtree.build import builder
from trtree.build.checkpoint import CheckpointError
from trtree.build.inspection import inspect
from trtree.build.network.network import NetworkError
from trtree.build.options import BuildOptions

StateDict = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.3"
Q = "model.layers.0.self_attn.q_proj"
LORA = "weight_quantizer._svdquant_lora_"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("smoothed")
    experts = glm4_moe_config()
    return {
        "awq": random_checkpoint(root / "awq", experts, algorithm="NVFP4_AWQ"),
        "svd": random_checkpoint(root / "svd", tiny_config(), algorithm="NVFP4_SVD"),
        "experts": random_checkpoint(root / "experts", experts, algorithm="NVFP4_SVD"),
    }


@pytest.fixture
def problem(whole: dict[str, Path], tmp_path: Path) -> Callable[..., str]:
    """What a build says of a checkpoint with ``change`` made to its tensors; --inspect says it
    too."""

    def check(kind: str, change: Callable[[StateDict], Any]) -> str:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        for file in whole[kind].iterdir():
            (directory / file.name).symlink_to(file)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        (directory / "model.safetensors").unlink()
        save_file(tensors, directory / "model.safetensors")
        with pytest.raises((CheckpointError, NetworkError)) as caught:
            builder.describe(BuildOptions(checkpoint=directory))
        assert str(caught.value) in inspect(directory).problems
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return check


def put(name: str, value: torch.Tensor) -> Callable[[StateDict], Any]:
    return lambda tensors: tensors.update({name: value})


def at_17(name: str, value: float) -> Callable[[StateDict], Any]:
    return lambda tensors: tensors[name].view(-1)[17].fill_(value)


VECTOR = f"{EXPERT}.down_proj.pre_quant_scale"
UP = f"{EXPERT}.up_proj.pre_quant_scale"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop(VECTOR),
            f"{EXPERT.replace('3', '0')}.down_proj scales its input, {EXPERT}.down_proj does not",
        ),
        (put(VECTOR, torch.ones(64)), f"tensor {VECTOR} has shape [64], expected [48]"),
        (put(VECTOR, torch.ones(48, dtype=torch.int32)), f"tensor {VECTOR} is int32, expected"),
        (at_17(VECTOR, torch.nan), f"tensor {VECTOR}: 1 of 48 values are NaN or infinite"),
        (at_17(VECTOR, 0.0), f"tensor {VECTOR} has 0.0 at 17, expected positive numbers"),
        (at_17(VECTOR, -1.5), f"tensor {VECTOR} has -1.5 at 17, expected positive numbers"),
        (at_17(UP, 0.75), f"{EXPERT}.up_proj scales its input by another vector than {EXPERT}.ga"),
        (
            put(f"{EXPERT}.up_proj.{LORA}a", torch.ones(8, 64)),
            f"{EXPERT}.up_proj.svdquant_lora_a belongs to NVFP4_SVD, but the configuration says",
        ),
    ],
)
def test_vectors_of_experts(problem: Callable[..., str], change: Any, named: str) -> None:
    assert named in problem("awq", change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop(f"{Q}.{LORA}a"),
            f"{Q} is NVFP4_SVD but has no tensor {Q}.svdquant_lora_a",
        ),
        (
            lambda t: t.pop(f"{Q}.{LORA}b"),
            f"{Q} is NVFP4_SVD but has no tensor {Q}.svdquant_lora_b",
        ),
        (
            lambda t: t.pop(f"{Q}.pre_quant_scale"),
            f"{Q} is NVFP4_SVD but has no tensor {Q}.pre_quant_scale",
        ),
        (
            put(f"{Q}.{LORA}a", torch.ones(8, 48)),
            f"tensor {Q}.svdquant_lora_a has shape [8, 48], expected [rank, 64]",
        ),
        (
            put(f"{Q}.{LORA}a", torch.ones(0, 64)),
            f"tensor {Q}.svdquant_lora_a has shape [0, 64], expected [rank, 64]",
        ),
        (
            put(f"{Q}.{LORA}b", torch.ones(64, 9)),
            f"tensor {Q}.svdquant_lora_b has shape [64, 9], expected [64, 8]",
        ),
        (
            put(f"{Q}.{LORA}b", torch.ones(64, 8, dtype=torch.uint8)),
            f"tensor {Q}.svdquant_lora_b is uint8, expected bfloat16",
        ),
        (at_17(f"{Q}.{LORA}a", torch.inf), f"tensor {Q}.svdquant_lora_a: 1 of 512 values are NaN"),
        (
            put(f"{Q}.svdquant_lora_a", torch.ones(8, 64)),
            f"{Q}.svdquant_lora_a and {Q}.{LORA}a are both there",
        ),
    ],
)
def test_factors(problem: Callable[..., str], change: Any, named: str) -> None:
    assert named in problem("svd", change)


def test_a_checkpoint_without_any_factors(problem: Callable[..., str]) -> None:
    def strip(tensors: StateDict) -> None:
        for name in [n for n in tensors if LORA in n or n.endswith("pre_quant_scale")]:
            del tensors[name]

    expected = "says NVFP4_SVD, but no module has a tensor svdquant_lora_a"
    assert expected in problem("svd", strip)


def test_factors_of_experts(problem: Callable[..., str]) -> None:
    change = at_17(f"{EXPERT}.up_proj.{LORA}a", 3.0)
    expected = f"{EXPERT}.up_proj has another svdquant_lora_a than {EXPERT}.gate_proj"
    assert expected in problem("experts", change)


def test_factors_that_differ_are_not_fused(whole: dict[str, Path], tmp_path: Path) -> None:
    """Each linear then has a pair of its own."""
    tensors = load_file(whole["svd"] / "model.safetensors")
    tensors[f"{Q}.{LORA}a"] = 1 - tensors[f"{Q}.{LORA}a"]
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for file in whole["svd"].iterdir():
        if file.name != "model.safetensors":
            (directory / file.name).symlink_to(file)
    save_file(tensors, directory / "model.safetensors")
    network = builder.describe(BuildOptions(checkpoint=directory)).networks["target"]
    products = {op.name for op in network.ops if op.kind == "linear"}
    layer = "model.layers.{}.self_attn."
    assert f"{layer.format(1)}q_proj+k_proj+v_proj.svdquant_lora_a" in products
    assert {f"{layer.format(0)}{x}_proj.svdquant_lora_a" for x in "qkv"} <= products
