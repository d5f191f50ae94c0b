"""The dense linear in torch: products accumulated in float64, rounded once to the input's dtype."""

import torch


class PreparedDense:
    """A linear with weight [O, K] (bf16, fp16 or float32) widened to float64 once.

    Args:
        weight: [O, K].
        bias: [O], added before the rounding.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.double()
        self._bias = None if bias is None else bias.double()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] -> [R, O] in x's dtype (float32 or bf16)."""
        if x.ndim != 2 or x.shape[1] != self._weight.shape[1]:
            raise ValueError(
                f"input {list(x.shape)} does not fit weight {list(self._weight.shape)}"
            )
        y = x.double() @ self._weight.T
        return (y if self._bias is None else y + self._bias).to(x.dtype)


def dense_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x float32 [R, K], weight [O, K] -> float32 [R, O], in one call."""
    return PreparedDense(weight, bias)(x)
