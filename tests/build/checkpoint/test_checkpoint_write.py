"""The writer: what it writes reads back, appears whole, and is laid out as ModelOpt's."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from trtree.build.checkpoint import Checkpoint, QuantizationConfig
from trtree.build.checkpoint.quantization import SIDECAR
from trtree.build.checkpoint.reader import INDEX
from trtree.build.checkpoint.write import quantize_state_dict, write_checkpoint
from trtree.plugins.nvfp4_linear import format as nvfp4

StateDict = dict[str, torch.Tensor]
Open = Callable[..., Checkpoint]

ATTENTION = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]


def test_the_safetensors_package_reads_the_shards(
    write: Callable[..., Path], dense: StateDict
) -> None:
    directory = write(dense, algorithm=None, max_shard_bytes=5000)
    index = json.loads((directory / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in dense.values())
    read: StateDict = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= 5000
        read |= tensors
    assert read.keys() == dense.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in dense.items())


def test_a_tensor_larger_than_a_shard_stands_alone(open_tensors: Open, dense: StateDict) -> None:
    checkpoint = open_tensors(dense, algorithm=None, max_shard_bytes=1)
    assert len({checkpoint.info(name).file for name in checkpoint.names()}) == len(dense)


def test_one_shard_needs_no_index(write: Callable[..., Path], dense: StateDict) -> None:
    directory = write(dense, algorithm=None, max_shard_bytes=1 << 30)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert list(directory.parent.iterdir()) == [directory]


def test_nothing_half_written_remains(tmp_path: Path, dense: StateDict) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from dense.items()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_checkpoint(tmp_path / "model", failing(), {}, max_shard_bytes=5000)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_kept(tmp_path: Path, dense: StateDict) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match="model exists"):
        write_checkpoint(tmp_path / "model", dense.items(), {})
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_quantization_is_written_twice_and_agrees(
    open_tensors: Open, dense: StateDict, algorithm: str
) -> None:
    tensors = dict(quantize_state_dict(dense.items(), algorithm=algorithm))
    checkpoint = open_tensors(tensors, algorithm=algorithm)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.algorithm == algorithm
    has_input_scale = f"{ATTENTION[0]}.input_scale" in checkpoint
    assert has_input_scale == (algorithm == "NVFP4")
    (checkpoint.directory / SIDECAR).unlink()
    again = Checkpoint.open(checkpoint.directory).quantization
    assert again is not None
    assert (again.algorithm, again.exclusions) == (algorithm, ("lm_head", "model.embed_tokens"))


def test_kv_cache_algorithm_is_written(tmp_path: Path, quantized: StateDict) -> None:
    for kv_cache in ("FP8", "NVFP4"):
        quantization = QuantizationConfig("NVFP4", ("lm_head",), kv_cache)
        directory = tmp_path / kv_cache
        write_checkpoint(directory, quantized.items(), {}, quantization=quantization)
        read = Checkpoint.open(directory).quantization
        assert read is not None and read.kv_cache == kv_cache


def test_only_linears_are_quantized(dense: StateDict, quantized: StateDict) -> None:
    for name, tensor in dense.items():
        left = "proj" not in name
        assert torch.equal(quantized[name], tensor) == left
        assert (f"{name}_scale" in quantized) != left


def test_a_quantized_linear_is_near_the_dense_one(open_tensors: Open, dense: StateDict) -> None:
    """Half an E2M1 step is at most 1/6 of the block's largest magnitude, scaled in e4m3."""
    checkpoint = open_tensors(dict(quantize_state_dict(dense.items())))
    for module in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
        weight = checkpoint.linear([module]).weight
        assert isinstance(weight, nvfp4.QuantizedTensor)
        original = dense[f"{module}.weight"].float()
        error = (nvfp4.dequantize(weight) - original).abs().reshape(-1, 16).amax(1)
        amax = original.abs().reshape(-1, 16).amax(1)
        assert torch.all(error <= amax * (1 / 6) * (1 + 1 / 16) + 1e-9)
        assert error.max() > 0


def test_siblings_share_the_largest_global_scale(dense: StateDict) -> None:
    shared = dict(quantize_state_dict(dense.items()))
    alone = dict(quantize_state_dict(dense.items(), fused=()))
    assert shared.keys() == alone.keys()
    scales = [shared[f"{module}.weight_scale_2"] for module in ATTENTION]
    own = [alone[f"{module}.weight_scale_2"] for module in ATTENTION]
    assert len(set(map(float, own))) == 3
    assert scales == [max(own)] * 3


def test_a_group_may_lack_members(dense: StateDict) -> None:
    del dense[f"{ATTENTION[1]}.weight"]
    result = dict(quantize_state_dict(dense.items()))
    assert result[f"{ATTENTION[0]}.weight_scale_2"] == result[f"{ATTENTION[2]}.weight_scale_2"]


def test_input_scales_are_given_per_module(dense: StateDict) -> None:
    tensors = [(name, tensor) for name, tensor in dense.items() if "q_proj" in name]
    given = dict(quantize_state_dict(tensors, input_scales={ATTENTION[0]: 0.25}))
    assert given[f"{ATTENTION[0]}.input_scale"] == 0.25
    with pytest.raises(ValueError, match=f"{ATTENTION[0]}: no input scale"):
        dict(quantize_state_dict(tensors, input_scales={}))


def test_what_cannot_be_quantized_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.b: .* 24 is not a multiple of 16"):
        dict(quantize_state_dict([("a.b.weight", torch.ones(4, 24))]))
    with pytest.raises(ValueError, match=r"a\.b: .*largest magnitude is 0"):
        dict(quantize_state_dict([("a.b.weight", torch.zeros(4, 32))]))
    with pytest.raises(ValueError, match="'FP8' is none of NVFP4"):
        dict(quantize_state_dict([], algorithm="FP8"))
