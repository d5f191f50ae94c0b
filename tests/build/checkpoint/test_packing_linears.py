"""Linears are packed from where they are stored: the bytes and the errors of reading them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from trtree.build.checkpoint import Checkpoint, CheckpointError, QuantizedCheckpoint
from trtree.build.lowering.packing import append_linear
from trtree.build.resumable import ResumableFile
from trtree.plugins.dense_linear import cpu as dense_cpu
from trtree.plugins.nvfp4_linear import cpu as nvfp4_cpu
from trtree.plugins.nvfp4_linear.format import QuantizedTensor

StateDict = dict[str, torch.Tensor]
Open = Callable[..., Checkpoint]
ATTENTION = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
Q = ATTENTION[0]


def packed(checkpoint: Checkpoint, modules: Sequence[str], path: Path) -> bytes:
    with ResumableFile(path) as file:
        linear = checkpoint.stored_linear(modules)
        place = append_linear(file, linear, modules, checkpoint)
    assert place == {"offset": 0, "bytes": path.stat().st_size}
    data = path.read_bytes()
    path.unlink()
    return data


def expected(checkpoint: Checkpoint, modules: Sequence[str]) -> bytes:
    weight = checkpoint.linear(modules).weight
    if isinstance(weight, QuantizedTensor):
        return nvfp4_cpu.pack(weight).tobytes()
    return dense_cpu.pack(weight).tobytes()


def test_the_bytes_are_those_of_reading_it(
    open_tensors: Open, dense: StateDict, quantized: StateDict, tmp_path: Path
) -> None:
    checkpoint = open_tensors(quantized, directory="quantized")
    plain = open_tensors(dense, algorithm=None, directory="plain")
    path = tmp_path / "file"
    # Of three global scales, so that two parts' block scales are rounded again.
    assert len({quantized[f"{m}.weight_scale_2"].item() for m in ATTENTION}) == 3
    for modules in (ATTENTION, [Q], ["lm_head"]):
        for read in (checkpoint, plain, QuantizedCheckpoint(plain)):
            assert packed(read, modules, path) == expected(read, modules)
            stored, linear = read.stored_linear(modules), read.linear(modules)
            assert stored.input_scale == linear.input_scale
            if isinstance(linear.weight, QuantizedTensor):
                assert stored.global_scale == linear.weight.global_scale


def test_a_linear_is_packed_in_pieces(
    open_tensors: Open, quantized: StateDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_tensors(quantized)
    monkeypatch.setattr("trtree.build.lowering.packing._PIECE", 2 * 16 * 32)
    monkeypatch.setattr("trtree.build.resumable._PIECE", 3000)  # of the file's own
    path = tmp_path / "file"
    for modules in (ATTENTION, ["lm_head"]):
        assert packed(checkpoint, modules, path) == expected(checkpoint, modules)


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_quantized_is_named(
    open_tensors: Open, dense: StateDict, tmp_path: Path, value: float, one_scale: bool
) -> None:
    dense[f"{Q}.weight"][40, 7] = value
    checkpoint = QuantizedCheckpoint(open_tensors(dense, algorithm=None), one_scale=one_scale)
    with pytest.raises(CheckpointError, match=rf"{Q}.weight: 1 of 2048 .* at \[40, 7\]"):
        packed(checkpoint, ATTENTION, tmp_path / "file")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_number_at_fault_is_named(
    open_tensors: Open, dense: StateDict, tmp_path: Path, value: float
) -> None:
    dense["lm_head.weight"][39, 31] = value
    checkpoint = open_tensors(dense, algorithm=None)
    with pytest.raises(CheckpointError, match=r"lm_head.weight: 1 of 1280 .* at \[39, 31\]"):
        packed(checkpoint, ["lm_head"], tmp_path / "file")
