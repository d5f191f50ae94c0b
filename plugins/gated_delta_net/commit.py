"""The committed state after a path, from what a pass over its rows kept: the commit of the
one-pass form (README.md)."""

import torch


def commit(
    committed: torch.Tensor, k: torch.Tensor, u: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    """S = exp(G_last) S0 + sum over the path's rows of exp(G_last - G_j) k_j u_j^T.

    Args:
        committed: float32 [..., value heads, key_dim, value_dim], S0.
        k: float32 [..., key heads, n, key_dim], unit keys of the n >= 1 rows, in order.
        u: float32 [..., value heads, n, value_dim].
        g: float32 [..., value heads, n], sums of log decays from the committed state on.
    """
    last = g[..., -1:]
    weights = (last - g).exp()  # of log decays that only fall: at most 1
    repeat = u.shape[-3] // k.shape[-3]
    keys = k.repeat_interleave(repeat, dim=-3) * weights[..., None]
    return last.exp()[..., None] * committed + keys.transpose(-1, -2) @ u
