"""The gated delta rule in obvious torch, float64 inside, rounded once: the oracle.

Per value head, with state S [key_dim, value_dim], for each token:

    S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = S^T q

(Gated Delta Networks, arXiv 2412.06464, equation 10), where k and q have unit length, q is
scaled by key_dim ** -0.5, beta = sigmoid(b) and g = -exp(A_log) softplus(a + dt_bias).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtree.plugins.branch_state import StateSegment, walk

# Under the root of a key's or query's length; flash-linear-attention's.
UNIT_EPS = 1e-6


@dataclass(frozen=True)
class DeltaInputs:
    """One layer's rows, wide: what the recurrence sees after its gates.

    q, k: [rows, value heads, key_dim]. v: [rows, value heads, value_dim]. decay (exp(g))
    and beta: [rows, value heads].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gates: torch.Tensor,
) -> DeltaInputs:
    """Raw rows to float64 inputs of the recurrence.

    Args:
        q, k: [rows, key heads, key_dim]; value head h uses key head h // (value heads / key
            heads).
        v: [rows, value heads, value_dim].
        a, b: [rows, value heads].
        gates: [2 * value heads]: A_log, then dt_bias.
    """
    repeat = v.shape[1] // k.shape[1]
    q, k = (_unit(x.double()).repeat_interleave(repeat, dim=1) for x in (q, k))
    a_log, dt_bias = gates.double().chunk(2)
    g = -a_log.exp() * torch.nn.functional.softplus(a.double() + dt_bias)
    return DeltaInputs(q * q.shape[2] ** -0.5, k, v.double(), g.exp(), b.double().sigmoid())


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gates: torch.Tensor,
    committed: torch.Tensor,
    segments: Sequence[StateSegment],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, value heads, value_dim] in v's dtype, and each row's state.

    The operands are ``prepare``'s. committed: [slots, value heads, key_dim, value_dim];
    states [rows, ...] are rounded to its dtype after every row, so that a row does not
    depend on how many tokens its step had.
    """
    rows = prepare(q, k, v, a, b, gates)
    out = torch.empty(v.shape, dtype=torch.float64)

    def move(row: int, before: torch.Tensor) -> torch.Tensor:
        state = before.double() * rows.decay[row, :, None, None]
        read = torch.einsum("hkv,hk->hv", state, rows.k[row])
        u = rows.beta[row, :, None] * (rows.v[row] - read)
        state = state + rows.k[row, :, :, None] * u[:, None, :]
        out[row] = torch.einsum("hkv,hk->hv", state, rows.q[row])
        return state.to(committed.dtype)

    states = walk(committed, segments, move)
    return out.to(v.dtype), states


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + UNIT_EPS)
