"""FP8 in blocks of 128 x 128, as transformers, DeepSeek and Qwen write it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import write_target
from fp8_blocks import in_blocks, spread, stored_in_blocks, write_in_blocks
from random_moe import qwen3_moe_config, random_moe
from steps import prefill
from trtree import _core
from trtree.build import builder
from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.build.options import BuildOptions
from trtree.runtime.engines import open_engine

STORED = ("_proj.weight",)
CONFIG = qwen3_moe_config(hidden_size=192, moe_intermediate_size=160)
Q = "model.layers.0.self_attn.q_proj"
StateDict = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> StateDict:
    return stored_in_blocks(random_moe(CONFIG, dtype=torch.bfloat16))


def write(directory: Path, tensors: StateDict, **changes: Any) -> Path:
    return write_in_blocks(directory, tensors, CONFIG, **changes)


def widened(tensors: StateDict) -> StateDict:
    """By the format's definition, in float32."""
    return {
        name: tensor.float() * spread(tensors[f"{name}_scale_inv"], tensor)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def test_weights_are_the_stored_codes_times_their_blocks_scales(
    tmp_path: Path, tensors: StateDict
) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "model", tensors))
    assert checkpoint.linear_info(Q).algorithm == "FP8_BLOCK"
    assert checkpoint.linear_info("model.layers.1.mlp.gate").algorithm is None
    expected = widened(tensors)
    shapes = set()
    for name in [n for n in expected if n.endswith(STORED)]:
        ours = checkpoint.linear([name.removesuffix(".weight")]).weight
        assert isinstance(ours, torch.Tensor) and torch.equal(ours, expected[name])
        shapes.add(tuple(ours.shape))
    assert {(160, 192), (192, 160)} <= shapes  # the last blocks are narrower on either axis


def test_whole_blocks_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    weight, scale = in_blocks(torch.randn(384, 256, generator=generator))
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    tensors = {f"{Q}.weight": weight, f"{Q}.weight_scale_inv": scale}
    ours = Checkpoint.open(write(tmp_path / "model", tensors)).linear([Q]).weight
    assert isinstance(ours, torch.Tensor) and torch.equal(ours, theirs)


def test_an_engine_is_that_of_the_widened_weights(tmp_path: Path, tensors: StateDict) -> None:
    write_target(tmp_path / "float32", widened(tensors), CONFIG)
    write(tmp_path / "fp8", tensors)
    prompt, logits = list(range(3, 43)), []
    for name in ("fp8", "float32"):
        options = BuildOptions(checkpoint=tmp_path / name, output=tmp_path / f"{name}.engine")
        _, engine = open_engine(builder.write(builder.describe(options)))
        logits.append(prefill(engine, _core.Sequence(1, 0, 0, list(range(3))), prompt))
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale_inv"), f"{Q} is FP8_BLOCK but has no tensor"),
        (
            lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 2)}),
            r"weight_scale_inv has shape \[3, 2\], expected \[1, 2\]",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale_inv": -torch.ones(1, 2)}),
            "weight_scale_inv has values that are not positive",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(1)}),
            f"{Q}.weight_scale belongs to a quantization that is not",
        ),
        (
            lambda t: t.update({f"{Q}.weight": torch.zeros(64, 192).bfloat16()}),
            f"{Q}.weight is bfloat16, but {Q}.weight_scale_inv is there as well",
        ),
    ],
)
def test_odd_linears_are_refused(
    tmp_path: Path, tensors: StateDict, change: Callable[[StateDict], Any], message: str
) -> None:
    changed = dict(tensors)
    change(changed)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(write(tmp_path / "model", changed)).linear([Q])


@pytest.mark.parametrize(
    "changes",
    [{"weight_block_size": [1, 32]}, {"weight_block_size": None}, {"activation_scheme": "static"}],
)
def test_other_forms_are_refused(
    tmp_path: Path, tensors: StateDict, changes: dict[str, Any]
) -> None:
    (field,) = changes
    with pytest.raises(CheckpointError, match=f"{field} .* is not supported; only"):
        Checkpoint.open(write(tmp_path / "model", tensors, **changes))
