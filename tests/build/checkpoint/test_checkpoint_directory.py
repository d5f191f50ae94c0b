"""Opening a directory: files, index, coverage; reading the tensors of the demo pair."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtree.build.checkpoint import Checkpoint, CheckpointError
from trtree.build.checkpoint.reader import INDEX

StateDict = dict[str, torch.Tensor]
Open = Callable[..., Checkpoint]
Write = Callable[..., Path]
EditJson = Callable[[Path, Callable[[dict[str, Any]], None]], None]


def test_the_demo_target_reads_as_the_safetensors_package_reads_it(demo: Path) -> None:
    checkpoint = Checkpoint.open(demo / "target_nvfp4")
    expected = load_file(demo / "target_nvfp4" / "model.safetensors")
    assert checkpoint.names() == sorted(expected)
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.activations_of("model.layers.0.mlp.up_proj") == "nvfp4"
    for name, tensor in expected.items():
        info = checkpoint.info(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tensor.shape)
        read = checkpoint.tensor(name)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_shards_read_as_one(write: Write, dense: StateDict) -> None:
    directory = write(dense, algorithm=None, max_shard_bytes=5000)
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 2
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.quantization is None
    assert checkpoint.names() == sorted(dense)
    assert "lm_head.weight" in checkpoint and "lm_head.bias" not in checkpoint
    for name, tensor in dense.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_an_unknown_tensor_is_named(open_tensors: Open, dense: StateDict) -> None:
    checkpoint = open_tensors(dense, algorithm=None)
    for read in (checkpoint.info, checkpoint.tensor):
        with pytest.raises(CheckpointError, match=f"{checkpoint.directory}: has no tensor nope"):
            read("nope")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_that_are_not_finite_are_counted_and_located(
    open_tensors: Open, dense: StateDict, bad: float, dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    dense[name] = dense[name].to(dtype)
    dense[name][2, 5] = dense[name][3, 1] = bad
    checkpoint = open_tensors(dense, algorithm=None)
    with pytest.raises(
        CheckpointError,
        match=rf"model.safetensors: tensor {name}: 2 of 1536 values are NaN .* at \[2, 5\]",
    ):
        checkpoint.tensor(name)


# The directory


def test_a_hub_id_gets_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match="hf download nvidia/Qwen3-8B-NVFP4 --local-dir Qwen3-8B-NVFP4"
    ):
        Checkpoint.open(Path("nvidia/Qwen3-8B-NVFP4"))


def test_a_missing_directory_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone: no such directory$"):
        Checkpoint.open(tmp_path / "gone")


def test_a_file_is_no_directory(write: Write, dense: StateDict) -> None:
    file = write(dense, algorithm=None) / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors: is a file"):
        Checkpoint.open(file)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(write: Write, dense: StateDict, name: str) -> None:
    directory = write(dense, algorithm=None)
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(CheckpointError, match=rf"pickle files \({name}\).*convert them to safe"):
        Checkpoint.open(directory)


def test_pickles_beside_safetensors_are_not_read(write: Write, dense: StateDict) -> None:
    directory = write(dense, algorithm=None)
    (directory / "training_args.bin").write_bytes(b"anything")
    assert Checkpoint.open(directory).names() == sorted(dense)


def test_an_empty_directory_is_refused(write: Write, dense: StateDict) -> None:
    directory = write(dense, algorithm=None)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model.safetensors and no model.safe.*index"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not valid JSON"), ("[]", "holds a list")],
)
def test_a_broken_config_is_refused(
    write: Write, dense: StateDict, content: str | None, message: str
) -> None:
    config = write(dense, algorithm=None) / "config.json"
    config.unlink()
    if content is not None:
        config.write_text(content)
    with pytest.raises(CheckpointError, match=f"{config}: {message}"):
        Checkpoint.open(config.parent)


# The index


@pytest.fixture
def sharded(write: Write, dense: StateDict) -> Path:
    return write(dense, algorithm=None, max_shard_bytes=5000)


def test_a_missing_shard_is_named_with_its_tensors(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    count = len(load_file(shard))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {shard.name} \({count} tensors\)"):
        Checkpoint.open(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated: tensor model\.layers"):
        Checkpoint.open(sharded)


def test_a_missing_index_is_asked_for(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=f"neither model.safetensors nor {INDEX}"):
        Checkpoint.open(sharded)


def test_a_tensor_that_the_index_lacks_is_named(sharded: Path, edit_json: EditJson) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=rf"holds model.norm.weight, which {INDEX} does not"):
        Checkpoint.open(sharded)


def test_a_tensor_that_the_shard_lacks_is_named(sharded: Path, edit_json: EditJson) -> None:
    first = sorted(sharded.glob("*.safetensors"))[0].name
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"extra": first}))
    with pytest.raises(CheckpointError, match=rf"{first}: lacks extra, which {INDEX} maps to it"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", 3])
def test_the_index_names_files_of_its_directory(
    sharded: Path, edit_json: EditJson, target: Any
) -> None:
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"x": target}))
    with pytest.raises(CheckpointError, match=f"tensor x is mapped to {target!r}, no file name"):
        Checkpoint.open(sharded)


def test_an_index_without_a_map_is_refused(sharded: Path, edit_json: EditJson) -> None:
    edit_json(sharded / INDEX, lambda index: index.clear())
    with pytest.raises(CheckpointError, match=f"{INDEX}: has no weight_map"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00009-of-00009.safetensors"])
def test_files_of_another_model_are_noticed(sharded: Path, name: str) -> None:
    save_file({"x": torch.zeros(2)}, sharded / name)
    with pytest.raises(CheckpointError, match=f"{INDEX}: does not name {name}"):
        Checkpoint.open(sharded)


def test_safetensors_that_are_no_shards_are_left_alone(sharded: Path, dense: StateDict) -> None:
    shutil.copy(sorted(sharded.glob("*.safetensors"))[0], sharded / "adapter.safetensors")
    assert Checkpoint.open(sharded).names() == sorted(dense)


# Coverage


def test_coverage_counts_tensors_and_modules(open_tensors: Open, quantized: StateDict) -> None:
    quantized["model.rotary.inv_freq"] = torch.tensor(1.0)
    checkpoint = open_tensors(quantized)
    modules = {name.rpartition(".")[0] for name in checkpoint.names()}
    checkpoint.check_coverage(modules, ignored=["*.inv_freq"])
    checkpoint.check_coverage(checkpoint.names())
    with pytest.raises(CheckpointError, match=r"1 of \d+ tensors .*rotary.inv_freq;"):
        checkpoint.check_coverage(modules)


def test_left_over_tensors_are_named_and_counted(open_tensors: Open, dense: StateDict) -> None:
    checkpoint = open_tensors(dense, algorithm=None)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_coverage(["lm_head", "model.norm.weight"], ["model.embed*"])
    message = str(caught.value)
    assert f"9 of {len(dense)} tensors would not be used" in message
    assert "model.layers.0.input_layernorm.weight" in message and "and 4 more" in message
