"""The NVFP4 number format: packing, dequantization, quantization.

A tensor [O, K] is stored as E2M1 codes, a float8 e4m3 scale per block of 16 along
K, and one float32 global scale: ``W = e2m1 * block_scale * global_scale``. Names
follow ModelOpt's export: ``weight``, ``weight_scale``, ``weight_scale_2``,
``input_scale``.

Arithmetic is float32, so that kernels can repeat it to the last bit.
"""

from typing import NamedTuple

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the least positive value

# Code -> value; the high bit of the nibble is the sign.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32)
E2M1_VALUES = torch.cat([_E2M1, -_E2M1])


class QuantizedTensor(NamedTuple):
    """codes: uint8 [O, K/2], low nibble = even element; block_scale: float8_e4m3fn
    [O, K/16]; global_scale: float32 scalar, or float64 where a checkpoint stores its
    reciprocal."""

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor


class QuantizedRows(NamedTuple):
    """Activations: values float32 [R, K] (E2M1 magnitudes); block_scale float32
    [R, K/16] (e4m3 values). ``x ~ values * block_scale * input_scale``."""

    values: torch.Tensor
    block_scale: torch.Tensor


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8 codes of the nearest E2M1 value; saturates at 6; ties to even.

    Values are 0.5 apart up to 2 (codes 0 to 4), 1 apart up to 4 (to 6), and then 6 (7): the
    steps taken in each range add up to the code, and each rounds its ties to an even one.
    """
    magnitude = x.abs()
    code = (2 * magnitude).clamp_(max=4).round_()
    code += magnitude.clamp(2, 4).round_()
    code += magnitude.mul_(0.5).clamp_(2, 3).round_()
    code -= 4  # the last two begin at 2
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K] -> [..., K/2], low nibble = even element."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> codes [..., K]."""
    pairs = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> float32 [..., K] of E2M1 values, unscaled."""
    return E2M1_VALUES[unpack(packed).long()]


def dequantize(weight: QuantizedTensor) -> torch.Tensor:
    """float32 [O, K]; equal to the exporters' own dequantization to the last bit.

    A block scale has 4 significant bits, so that its product with a float32 is exact in
    float64; with the float64 reciprocal of a float32 it is so near the quotient that both
    round to the same float32.
    """
    scale = (weight.block_scale.double() * weight.global_scale.double()).float()
    return e2m1_values(weight.codes) * scale.repeat_interleave(BLOCK, dim=-1)


def quantize_weight(
    weight: torch.Tensor, global_scale: torch.Tensor | None = None
) -> QuantizedTensor:
    """Max calibration: global = amax / (6 * 448), block scale = e4m3(amax / (6 * global)).

    As ModelOpt writes them, a zero block gets scale 1, and no block scale is below
    e4m3's least positive value. Linears to be fused are given one global scale, the
    largest of theirs.

    Raises:
        ValueError: K is not a multiple of 16, or the tensor is all zero or not finite.
    """
    rows, k = weight.shape
    if k % BLOCK:
        raise ValueError(f"cannot quantize [{rows}, {k}] to NVFP4: {k} is not a multiple of 16")
    blocks = weight.float().reshape(rows, k // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=-1)
    if global_scale is None:
        global_scale = amax.max() / (E2M1_MAX * E4M3_MAX)
    if not (torch.isfinite(global_scale) and global_scale > 0):
        raise ValueError(f"cannot quantize to NVFP4: the largest magnitude is {amax.max().item()}")
    scale = (amax / (E2M1_MAX * global_scale)).clamp(E4M3_MIN, E4M3_MAX)
    block_scale = torch.where(amax == 0, 1.0, scale).to(torch.float8_e4m3fn)
    step = (block_scale.float() * global_scale).unsqueeze(-1)
    codes = torch.where(step > 0, encode_e2m1(blocks / step), 0).to(torch.uint8)
    return QuantizedTensor(pack(codes.reshape(rows, k)), block_scale, global_scale)


def rescale(weight: QuantizedTensor, global_scale: torch.Tensor) -> QuantizedTensor:
    """The same tensor under another global scale; block scales are rounded to e4m3 again."""
    factor = weight.global_scale.float() / global_scale.float()
    block_scale = (weight.block_scale.float() * factor).clamp(max=E4M3_MAX)
    return QuantizedTensor(weight.codes, block_scale.to(torch.float8_e4m3fn), global_scale)


def quantize_rows(x: torch.Tensor, input_scale: torch.Tensor) -> QuantizedRows:
    """Quantize activations x float32 [R, K] in blocks of 16 along K.

    block_scale = e4m3(min(amax / (6 * input_scale), 448)) and
    values = e2m1(x / (block_scale * input_scale)); a block whose scale is or
    underflows to zero gives zeros.
    """
    rows, k = x.shape
    blocks = x.float().reshape(rows, k // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=-1)
    scale = (amax / (E2M1_MAX * input_scale.float())).clamp(max=E4M3_MAX)
    block_scale = scale.to(torch.float8_e4m3fn).float()
    step = (block_scale * input_scale.float()).unsqueeze(-1)
    codes = encode_e2m1(torch.where(step > 0, blocks / step, 0.0))
    return QuantizedRows(E2M1_VALUES[codes.long()].reshape(rows, k), block_scale)
