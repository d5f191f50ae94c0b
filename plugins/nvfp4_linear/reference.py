"""The NVFP4 linear in torch: products accumulated in float64, rounded once to the input's dtype.

The oracle of the kernels. Accumulating in float64 leaves a row's output the same
whatever batch it is in. With NVFP4 activations the sum is even exact while the
magnitudes add up to less than 2^33: every product (two E2M1 values, two e4m3
scales) is a multiple of 2^-20.
"""

from typing import Literal

import torch

from trtree.plugins.nvfp4_linear import format as nvfp4

Activations = Literal["nvfp4", "bf16", "float32"]


class PreparedLinear:
    """An NVFP4 linear with its weights expanded to float64 once, to be called many times.

    Args:
        weight: the quantized weight [O, K].
        input_scale: float32 scalar; used by "nvfp4" activations only.
        activations: how the input is rounded before the product: "nvfp4" (W4A4, see
            `format.quantize_rows`), "bf16" (W4A16), or "float32" (not at all).
        bias: float32 [O], added before the rounding.

    Raises:
        ValueError: unknown `activations`, or "nvfp4" without an input scale.
    """

    def __init__(
        self,
        weight: nvfp4.QuantizedTensor,
        input_scale: torch.Tensor | None,
        activations: Activations,
        bias: torch.Tensor | None = None,
    ) -> None:
        if activations not in ("nvfp4", "bf16", "float32"):
            raise ValueError(f"activations {activations!r}: expected nvfp4, bf16 or float32")
        self._activations = activations
        self._bias = None if bias is None else bias.double()
        if activations == "nvfp4":
            if input_scale is None:
                raise ValueError("activations 'nvfp4' need the linear's input_scale")
            self._input_scale = input_scale.float()
            scale = weight.block_scale.double().repeat_interleave(nvfp4.BLOCK, dim=-1)
            self._weight = nvfp4.e2m1_values(weight.codes).double() * scale
            # Two float32 multiply exactly in float64.
            self._output_scale = weight.global_scale.double() * input_scale.double()
        else:
            self._weight = nvfp4.dequantize(weight).double()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] -> [R, O] in x's dtype (float32 or bf16)."""
        if x.ndim != 2 or x.shape[1] != self._weight.shape[1]:
            raise ValueError(
                f"input {list(x.shape)} does not fit weight {list(self._weight.shape)}"
            )
        if self._activations == "nvfp4":
            rows = nvfp4.quantize_rows(x, self._input_scale)
            scale = rows.block_scale.double().repeat_interleave(nvfp4.BLOCK, dim=-1)
            y = ((rows.values.double() * scale) @ self._weight.T) * self._output_scale
        elif self._activations == "bf16":
            y = x.bfloat16().double() @ self._weight.T
        else:
            y = x.double() @ self._weight.T
        return (y if self._bias is None else y + self._bias).to(x.dtype)


def nvfp4_linear(
    x: torch.Tensor,
    weight: nvfp4.QuantizedTensor,
    input_scale: torch.Tensor | None,
    activations: Activations,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x float32 [R, K] -> float32 [R, O], in one call; see `PreparedLinear`."""
    return PreparedLinear(weight, input_scale, activations, bias)(x)
