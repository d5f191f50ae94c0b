"""What every implementation of latent attention is given; README.md defines the arithmetic."""

import torch


def check_operands(
    q: torch.Tensor, dim: int, value_dim: int, selection: torch.Tensor | None
) -> None:
    """q [rows, heads, dim] and int32 selection [rows, top_k] fit a cache of ``dim``.

    Raises:
        ValueError: they do not; the message names both values.
    """
    if q.ndim != 3 or q.shape[2] != dim or not 1 <= value_dim <= dim:
        raise ValueError(
            f"latent_attention: q {list(q.shape)}, latents of {dim}, values of {value_dim}"
        )
    if selection is not None and (selection.ndim != 2 or len(selection) != len(q)):
        raise ValueError(f"latent_attention: a selection {list(selection.shape)} for {len(q)} rows")
