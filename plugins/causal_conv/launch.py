"""Launches the kernels on torch tensors: a GPU's, or the CPU's under Triton's interpreter."""

import torch
import triton

from trtree.plugins.branch_tables import BranchTables
from trtree.plugins.causal_conv import tiles
from trtree.plugins.causal_conv.kernels.conv import causal_conv_commit_kernel, causal_conv_kernel


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    tables: BranchTables,
    *,
    rows_per_program: int = tiles.ROWS,
) -> torch.Tensor:
    """[rows, channels] in x's dtype; ``window`` is only read.

    x: [rows, channels], contiguous within a row. weight: float32 [channels, kernel]. window:
    [slots, kernel - 1, channels], of x's dtype.
    """
    rows, channels = x.shape
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, rows_per_program), triton.cdiv(channels, tiles.CHANNELS))
    causal_conv_kernel[grid](
        x,
        weight,
        window,
        tables.conv_inputs,
        tables.owners,
        tables.requests,
        rows,
        channels,
        x.stride(0),
        out,
        KERNEL=weight.shape[1],
        BLOCK=rows_per_program,
        BLOCK_C=tiles.CHANNELS,
    )
    return out


def commit(
    window: torch.Tensor,
    x: torch.Tensor,
    tables: BranchTables,
    accepted: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Move each request's window along its accepted rows, in place.

    accepted: int32 [requests, n], a path's rows, of which num_accepted int32 [requests] count.
    """
    _, kept, channels = window.shape
    grid = (len(num_accepted), triton.cdiv(channels, tiles.COMMIT_CHANNELS))
    causal_conv_commit_kernel[grid](
        x,
        tables.requests,
        accepted,
        num_accepted,
        channels,
        x.stride(0),
        accepted.shape[1],
        window,
        KERNEL=kept + 1,
        BLOCK_C=tiles.COMMIT_CHANNELS,
    )
