"""What the one-pass form leaves between a step and its commit; README.md defines the arithmetic."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowUpdates:
    """What a step keeps of its rows until commit: k [rows, key heads, key_dim] as it was given,
    update float32 [rows, heads, value_dim], decay float32 [rows, heads]."""

    k: torch.Tensor
    update: torch.Tensor
    decay: torch.Tensor
