"""What every implementation of the indexer's choice is given; README.md defines the arithmetic."""

import torch

# What follows a row's chosen slots where it sees fewer keys than it may choose.
NONE = -1


def check_operands(q: torch.Tensor, weights: torch.Tensor, dim: int, top_k: int) -> None:
    """q [rows, index_heads, dim] and float32 weights [rows, index_heads] fit a cache of ``dim``.

    Raises:
        ValueError: they do not; the message names both values.
    """
    if q.ndim != 3 or q.shape[2] != dim or weights.shape != q.shape[:2] or top_k < 1:
        raise ValueError(
            f"index_select: q {list(q.shape)}, weights {list(weights.shape)}, keys of {dim}, "
            f"top_k {top_k}"
        )


def score_scale(heads: int, dim: int) -> float:
    """(heads * dim) ** -0.5: heads ** -0.5 of the weights times dim ** -0.5 of the products."""
    return float((heads * dim) ** -0.5)
