"""The causal convolution in obvious torch, float64 inside, rounded once: the oracle."""

from collections.abc import Sequence

import torch

from trtree.plugins.branch_state import StateSegment, walk


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    committed: torch.Tensor,
    segments: Sequence[StateSegment],
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu of the convolution, and each row's window: the inputs that its children see.

    Args:
        x: [rows, channels].
        weight: [channels, kernel], the newest input's last.
        committed: [slots, kernel - 1, channels], oldest first.

    Returns:
        [rows, channels] in x's dtype, and windows [rows, kernel - 1, channels].
    """
    taps = weight.double().T
    sums = torch.empty(x.shape, dtype=torch.float64)

    def move(row: int, window: torch.Tensor) -> torch.Tensor:
        seen = torch.cat([window, x[row : row + 1]])
        sums[row] = (seen.double() * taps).sum(dim=0)
        return seen[1:]

    windows = walk(committed, segments, move)
    return (sums * torch.sigmoid(sums)).to(x.dtype), windows
