"""Launches the kernels on torch tensors: a GPU's, or the CPU's under Triton's interpreter.

``TRITON_INTERPRET=1`` must be set before ``triton`` is first imported; Triton decides then.
"""

import torch
import triton

from trtree.plugins.branch_tables import BranchTables
from trtree.plugins.gated_delta_net import tiles
from trtree.plugins.gated_delta_net.contract import RowUpdates
from trtree.plugins.gated_delta_net.kernels.commit import gated_delta_commit_kernel
from trtree.plugins.gated_delta_net.kernels.decay import gated_delta_decay_kernel
from trtree.plugins.gated_delta_net.kernels.delta import gated_delta_net_kernel
from trtree.plugins.gated_delta_net.reference import UNIT_EPS


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    tables: BranchTables,
    packed_mask: torch.Tensor,
    *,
    key_columns: int,
) -> tuple[torch.Tensor, RowUpdates]:
    """[rows, heads, value_dim] in v's dtype; ``state`` is only read.

    q, k, v, a, b: as reference.gated_delta_net's, of any stride between rows, contiguous
    within one. gates: float32 [2 * heads]. state: float32 [slots, heads, key_dim, value_dim].
    packed_mask: int32 [rows, words], ancestors and oneself. key_columns: tiles.key_columns.
    """
    rows, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    decay = _decay(a, gates, tables, packed_mask)
    update = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=v.device)
    out = torch.empty(rows, heads, value_dim, dtype=v.dtype, device=v.device)
    columns = triton.cdiv(value_dim, tiles.VALUE_COLUMNS)
    gated_delta_net_kernel[(len(tables.requests), heads, columns)](
        q,
        k,
        v,
        b,
        decay,
        packed_mask,
        tables.requests,
        state,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        b.stride(0),
        packed_mask.shape[1],
        update,
        out,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        GROUP=heads // key_heads,
        SCALE=key_dim**-0.5,
        EPS=UNIT_EPS,
        BLOCK=tiles.ROWS,
        BLOCK_K=key_columns,
        BLOCK_V=tiles.VALUE_COLUMNS,
        num_warps=tiles.WARPS,
        num_stages=tiles.STAGES,
    )
    return out, RowUpdates(k, update, decay)


def _decay(
    a: torch.Tensor, gates: torch.Tensor, tables: BranchTables, packed_mask: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, heads]: logarithms, summed along each row's path."""
    rows, heads = a.shape
    decay = torch.empty(rows, heads, dtype=torch.float32, device=a.device)
    blocks = triton.cdiv(tables.most_rows, tiles.DECAY_ROWS)
    gated_delta_decay_kernel[(len(tables.requests), blocks)](
        a,
        gates,
        packed_mask,
        tables.requests,
        a.stride(0),
        packed_mask.shape[1],
        decay,
        HEADS=heads,
        HEADS_PAD=tiles.head_columns(heads),
        BLOCK=tiles.DECAY_ROWS,
        num_warps=tiles.WARPS,
        num_stages=tiles.DECAY_STAGES,
    )
    return decay


def commit(
    state: torch.Tensor,
    rows: RowUpdates,
    tables: BranchTables,
    accepted: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Make the state of each request's last accepted row its committed one, in place.

    accepted: int32 [requests, n], a path's rows, of which num_accepted int32 [requests] count.
    """
    heads, value_dim = rows.update.shape[1:]
    key_heads, key_dim = rows.k.shape[1:]
    gated_delta_commit_kernel[
        (len(num_accepted), heads, triton.cdiv(value_dim, tiles.VALUE_COLUMNS))
    ](
        rows.k,
        rows.update,
        rows.decay,
        tables.requests,
        accepted,
        num_accepted,
        rows.k.stride(0),
        accepted.shape[1],
        state,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        GROUP=heads // key_heads,
        EPS=UNIT_EPS,
        BLOCK=tiles.COMMIT_ROWS,
        BLOCK_V=tiles.VALUE_COLUMNS,
        num_warps=tiles.commit_warps(key_dim),
        num_stages=tiles.STAGES,
    )
