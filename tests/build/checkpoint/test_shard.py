"""One safetensors file: the header's checks, and what mapping a tensor gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trtree.build.checkpoint import CheckpointError
from trtree.build.checkpoint.shard import MAX_HEADER_BYTES, map_tensor, read_header


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_reads_what_the_safetensors_package_writes(file: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "e4m3": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "e5m2": torch.randn(4, 4).to(torch.float8_e5m2),
        "e8m0": torch.ones(3).to(torch.float8_e8m0fnu),
        "half": torch.randn(7).half(),
        "scalar": torch.tensor(2.5),
        "codes": torch.arange(9, dtype=torch.uint8),
        "double": torch.randn(2, dtype=torch.float64),
        "ids": torch.arange(-3, 3),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header.keys() == tensors.keys()
    expected = load_file(file)
    for name, info in header.items():
        tensor = map_tensor(name, info)
        assert (info.shape, info.dtype, info.file) == (tensor.shape, tensor.dtype, file)
        assert info.nbytes == tensors[name].nbytes
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
        )


def test_unaligned_tensors_are_aligned_in_memory(file: Path) -> None:
    values = torch.tensor([1.0, -2.0], dtype=torch.float32)
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    write_raw(file, header, b"\x07" + values.numpy().tobytes())
    infos = read_header(file)
    assert map_tensor("a", infos["a"]).tolist() == [7]
    tensor = map_tensor("b", infos["b"])
    assert tensor.tolist() == [1.0, -2.0]
    assert tensor.data_ptr() % 4 == 0


def test_writing_to_a_tensor_leaves_the_file_alone(file: Path) -> None:
    save_file({"x": torch.zeros(4)}, file)
    before = file.read_bytes()
    tensor = map_tensor("x", read_header(file)["x"])
    tensor += 1
    assert tensor.tolist() == [1.0] * 4
    assert file.read_bytes() == before


def test_a_tensor_outlives_the_replacement_of_its_file(file: Path, tmp_path: Path) -> None:
    save_file({"x": torch.full((5000,), 3.0)}, file)
    tensor = map_tensor("x", read_header(file)["x"])
    other = tmp_path / "other"
    save_file({"x": torch.full((5000,), 4.0)}, other)
    other.rename(file)
    assert torch.all(tensor == 3.0)


def test_a_file_may_be_larger_than_memory(file: Path) -> None:
    """A sparse file of 1 TB with one small tensor behind a large one."""
    size = 1 << 40
    header = json.dumps(
        {"big": entry("U8", [size], 0, size), "small": entry("F32", [2], size, size + 8)}
    ).encode()
    write_raw(file, header)
    with file.open("r+b") as stream:
        stream.seek(8 + len(header) + size)
        stream.write(torch.tensor([5.0, 6.0]).numpy().tobytes())
    assert map_tensor("small", read_header(file)["small"]).tolist() == [5.0, 6.0]


def test_a_file_truncated_after_opening_is_named(file: Path) -> None:
    save_file({"x": torch.zeros(5000)}, file)
    info = read_header(file)["x"]
    with file.open("r+b") as stream:
        stream.truncate(1000)
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor x: cannot map 20000"):
        map_tensor("x", info)


two = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [4], 8, 12)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{]", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "'a' occurs twice"),
        ({"a": 3}, b"", "tensor a: header entry lacks"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "tensor a: header entry lacks"),
        ({"a": entry("F4", [2], 0, 1)}, b"1", "tensor a: dtype 'F4' is not supported"),
        ({"a": entry("F32", [-1], 0, 4)}, b"1234", r"tensor a: shape \[-1\]"),
        ({"a": entry("F32", [True], 0, 4)}, b"1234", r"tensor a: shape \[True\]"),
        ({"a": entry("F32", [1], 4, 0)}, b"1234", r"tensor a: data_offsets \[4, 0\]"),
        ({"a": entry("F32", [3], 0, 8)}, b"12345678", r"takes 12 bytes, data_offsets .* hold 8"),
        (two, b"123456789012"[:11], r"truncated: tensor b ends at byte \d+, the file has \d+"),
        (two, b"123456789012" + b"3", r"the tensors end at byte \d+, the file has \d+"),
        (two | {"b": entry("U8", [4], 6, 10)}, b"1" * 10, "tensor b begins .* and overlaps a"),
        (two | {"b": entry("U8", [4], 9, 13)}, b"1" * 13, "tensor b begins .* leaves a gap after"),
        ({"a": entry("U8", [2], 1, 3)}, b"123", "tensor a begins .* gap after the header"),
    ],
)
def test_a_damaged_header_is_refused(file: Path, header: Any, data: bytes, message: str) -> None:
    write_raw(file, header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header"),
        (b"abc", "no header"),
        ((0).to_bytes(8, "little"), "no header"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "header of 100000001 bytes exceeds"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: the header has 100 bytes, .* 2 of"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{file}: cannot be read: No such file"):
        read_header(file)
