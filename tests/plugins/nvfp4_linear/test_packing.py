"""Packed bytes are the layout's by definition, from whatever parts, on every instruction set."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from linear_cases import ISAS, before_guard_page
from trtree.plugins.dense_linear import cpu as dense_cpu
from trtree.plugins.dense_linear.cpu import DenseRows, Rows
from trtree.plugins.nvfp4_linear import cpu as nvfp4_cpu
from trtree.plugins.nvfp4_linear import format as nvfp4
from trtree.plugins.nvfp4_linear.cpu import CodedRows, RoundedRows

Bytes = npt.NDArray[np.uint8]
SHAPES = [(1, 16), (16, 64), (17, 48), (40, 208), (64, 1024), (3, 2064)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
every_isa = pytest.mark.parametrize("isa", ISAS)


def coded(rows: int, k: int, seed: int = 0) -> nvfp4.QuantizedTensor:
    """Any codes and any legal scales, -0 among them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (rows, k // 16), dtype=torch.uint8, generator=generator)
    scales[0, 0] = 0x80
    return nvfp4.QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), torch.tensor(1.0))


def numbers(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Blocks of magnitudes from none and subnormal to large, with ties and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-13, 14, (rows, k // 16, 16), generator=generator) / 2.0
    x *= 2.0 ** torch.randint(-14, 3, (rows, k // 16, 1), generator=generator)
    x[0, 0] = 0.0
    x[-1, -1, ::3] = -0.0
    return x.reshape(rows, k).to(dtype)


def coded_by_definition(weight: nvfp4.QuantizedTensor) -> Bytes:
    """README.md, "Packed weights", number by number."""
    elements = nvfp4.unpack(weight.codes).numpy()
    scales = weight.block_scale.view(torch.uint8).numpy() & 0x7F
    rows, k = elements.shape
    tiles, groups = -(-rows // 16), -(-k // 64)
    packed = np.zeros((tiles, groups, 576), np.uint8)
    for row in range(rows):
        for block in range(k // 16):
            group = packed[row // 16, block // 4]
            column, at = row % 16, block % 4
            group[16 * at + column] = scales[row, block]
            codes = elements[row, 16 * block : 16 * block + 16]
            for p in range(2):
                for i in range(4):
                    both = codes[8 * p + i] | codes[8 * p + 4 + i] << 4
                    group[64 + 128 * at + 64 * p + 4 * column + i] = both
    return packed.reshape(-1)


def dense_by_definition(weight: torch.Tensor) -> Bytes:
    """[K, 16] by tile, and up to 64 bytes' multiple of zeros."""
    rows, k = weight.shape
    size = weight.dtype.itemsize
    tiles = -(-rows // 16)
    bytes_of = np.zeros((tiles, 16, k, size), np.uint8)
    bytes_of.reshape(tiles * 16, k, size)[:rows] = (
        weight.view(torch.uint8).numpy().reshape(rows, k, size)
    )
    tile = bytes_of.transpose(0, 2, 1, 3).reshape(tiles, -1)
    return np.pad(tile, ((0, 0), (0, -tile.shape[1] % 64))).reshape(-1)


def in_pieces(rows: Rows, sizes: Sequence[int]) -> Bytes:
    """Packed some tiles at a time, into memory that was used before."""
    pieces, first, count = [], 0, rows.shape[0]
    for size in sizes * count:
        if first < count:
            end = min(first + 16 * size, count)
            piece = np.full(rows.packed_size(first, end), 0xAA, np.uint8)
            rows.pack(first, end, piece)
            pieces.append(piece)
            first = end
    return np.concatenate(pieces)


def cut(tensor: torch.Tensor, at: Sequence[int]) -> list[torch.Tensor]:
    """Parts that lie far apart, each in the middle of wider rows."""
    parts = torch.tensor_split(tensor, [i for i in at if i < len(tensor)])
    wide = [torch.nn.functional.pad(part.view(torch.uint8), (3 * 32, 32)) for part in parts]
    bytes_per_row = tensor.shape[1] * tensor.dtype.itemsize
    return [w[:, 96 : 96 + bytes_per_row].view(tensor.dtype) for w in wide]


@every_isa
@pytest.mark.parametrize("shape", SHAPES)
def test_codes(shape: tuple[int, int], isa: str) -> None:
    weight = coded(*shape)
    expected = coded_by_definition(weight)
    assert np.array_equal(nvfp4_cpu.pack(weight, isa=isa), expected)
    scales = cut(weight.block_scale.view(torch.uint8), [4, 30])
    rows = CodedRows(cut(weight.codes, [5, 21]), scales, isa=isa)
    assert rows.shape == shape
    assert np.array_equal(in_pieces(rows, [1, 2]), expected)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 1), (33, 37)])
def test_numbers(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    expected = dense_by_definition(weight)
    assert np.array_equal(dense_cpu.pack(weight, isa=isa), expected)
    rows = DenseRows(cut(weight, [3, 16, 30]), isa=isa)
    assert rows.shape == shape
    assert np.array_equal(in_pieces(rows, [2, 1]), expected)
    assert rows.largest_magnitude() == weight.float().abs().max()


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_is_the_formats(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> None:
    weight = numbers(*shape, dtype)
    # Of its own scale, of one that saturates, and of ones whose block scales or steps vanish.
    for scale in (1.0, 1 / 64, 1e-3, 2.0**-20, 1e-40, 7.3):
        rounded = nvfp4.quantize_weight(weight, torch.tensor(scale))
        rows = RoundedRows(cut(weight, [2, 19]), scale, isa=isa)
        expected = coded_by_definition(rounded)
        assert np.array_equal(in_pieces(rows, [1]), expected), scale


@every_isa
def test_nothing_past_the_end_is_read(isa: str) -> None:
    weight = coded(20, 80)
    raw = weight.block_scale.view(torch.uint8).numpy()
    codes, scales = (torch.from_numpy(before_guard_page(x)) for x in (weight.codes.numpy(), raw))
    rows = CodedRows([codes], [scales], isa=isa)
    assert np.array_equal(in_pieces(rows, [1]), coded_by_definition(weight))
    dense = torch.randn(20, 37)
    last = torch.from_numpy(before_guard_page(dense.numpy()))
    assert np.array_equal(in_pieces(DenseRows([last], isa=isa), [1]), dense_by_definition(dense))


@every_isa
@pytest.mark.parametrize("bits", [0x7F, 0x81, 0xFF])
@pytest.mark.parametrize(("row", "block"), [(0, 0), (15, 3), (16, 4), (19, 6)])
def test_scales_at_fault_are_found_anywhere(row: int, block: int, bits: int, isa: str) -> None:
    weight = coded(20, 112)
    weight.block_scale.view(torch.uint8)[row, block] = bits
    with pytest.raises(ValueError, match=rf"block scale \[{row}, {block}\] is negative or NaN"):
        nvfp4_cpu.pack(weight, isa=isa)


@every_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (15, 31), (16, 32), (19, 36)])
def test_numbers_at_fault_are_found_anywhere(
    row: int, column: int, value: float, dtype: torch.dtype, isa: str
) -> None:
    weight = torch.full((20, 37), torch.finfo(dtype).max, dtype=dtype)
    rows = DenseRows([weight], isa=isa)
    in_pieces(rows, [1])  # the largest finite number is one
    weight[row, column] = value
    with pytest.raises(ValueError, match=r"\[20, 37\]: rows \d+ to \d+ have numbers that are NaN"):
        in_pieces(rows, [1])
    assert not np.isfinite(rows.largest_magnitude())


@pytest.mark.parametrize(("first", "end"), [(8, 16), (0, 17), (-16, 0), (16, 21)])
def test_pieces_are_whole_tiles(first: int, end: int) -> None:
    weight = coded(20, 64)
    rows = CodedRows([weight.codes], [weight.block_scale])
    with pytest.raises(ValueError, match=rf"\[20, 64\]: rows {first} to {end} are no tiles"):
        rows.pack(first, end, np.empty(576, np.uint8))
    with pytest.raises(ValueError, match="take 576 bytes packed, there is room for 100"):
        rows.pack(0, 16, np.empty(100, np.uint8))
