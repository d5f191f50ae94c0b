"""NVFP4 rounding for training: what `trtree.plugins.nvfp4_linear.format` computes, float32
throughout, in operations that torch.compile fuses and with a gradient.

A tensor is quantized in blocks of 16 along its last axis. With a per-tensor scale `s`,
the block scale is ``e4m3(min(amax / (6 s), 448))`` and the values are ``e2m1(x / (scale s))``,
both rounded to nearest even; a zero scale gives zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtree.plugins.nvfp4_linear.format import BLOCK, E2M1_MAX, E4M3_MAX


def tensor_scale(amax: Tensor) -> Tensor:
    """Per-tensor scale [] of a tensor whose largest magnitude is `amax` []."""
    return amax / (E2M1_MAX * E4M3_MAX)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with x's sign, ties to the even code."""
    size = x.abs().clamp(max=E2M1_MAX)
    small = torch.round(size * 2) * 0.5
    middle = torch.round(size)
    large = torch.round(size * 0.5) * 2
    return torch.where(size < 2, small, torch.where(size < 4, middle, large)).copysign(x)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn of 0 <= x <= 448, ties to even, by float32 arithmetic.

    Veltkamp's splitting keeps 4 significant bits; below 2**-6 the spacing is 2**-9.
    """
    shifted = x * 1048577.0  # 2**20 + 1
    normal = shifted - (shifted - x)
    subnormal = torch.round(x * 512.0) * (1.0 / 512.0)
    return torch.where(x < 0.015625, subnormal, normal)


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize and dequantize x [..., n] (float32) with the per-tensor scale []."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    step = round_e4m3((amax / (E2M1_MAX * scale)).clamp(max=E4M3_MAX)) * scale
    values = round_e2m1(blocks / torch.where(step > 0, step, torch.ones_like(step)))
    return torch.where(step > 0, values * step, torch.zeros_like(blocks)).flatten(-2)


def straight_through(x: Tensor, scale: Tensor) -> Tensor:
    """`fake_quantize` whose gradient is the identity."""
    return x + (fake_quantize(x.detach(), scale) - x.detach())


def fake_quantize_weights(*weights: Tensor) -> list[Tensor]:
    """Max-calibrated weights [out, in] that share one per-tensor scale (q/k/v, gate/up).

    The gradient is the identity.
    """
    amax = torch.stack([w.detach().abs().amax() for w in weights]).amax()
    scale = tensor_scale(amax.float())
    return [straight_through(w.float(), scale) for w in weights]
