"""Routing and experts in torch: float64 inside, every result rounded once.

The oracle of the kernels and of the TensorRT lowering.
"""

from collections.abc import Callable, Sequence

import torch

from trtree.plugins.moe.contract import Routing

# [rows, K] -> [rows, O] in the input's dtype; of float64, without rounding.
Linear = Callable[[torch.Tensor], torch.Tensor]
# Keeps the sum of scores that all underflow from dividing by zero (as transformers' GLM does).
TINY = 1e-20


def route(
    logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
) -> torch.Tensor:
    """logits float32 [rows, experts] -> weights float32 [rows, experts], 0 where not chosen.

    ``correction_bias`` [experts] is added to the scores for the choice alone. Of equal
    scores the lower expert id is chosen, of equal groups the lower.
    """
    wide = logits.double()
    if routing.scores == "softmax":
        scores = wide.softmax(-1)
        choice = wide  # in the order of the scores, without their rounding
    else:
        scores = choice = wide.sigmoid()
    if correction_bias is not None:
        choice = scores + correction_bias.double()
    if routing.groups > 1:
        grouped = choice.reshape(-1, routing.groups, routing.group_size)
        best = _largest(grouped.topk(2, dim=-1).values.sum(-1), routing.top_groups)
        choice = grouped.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(-2)
    weights = torch.where(_largest(choice, routing.top_k), scores, 0.0)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return (weights * routing.scale).float()


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool: the ``count`` largest along the last axis; of equal ones the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)


def slots(weights: torch.Tensor) -> torch.Tensor:
    """int64 [rows, experts]: the how-many-eth of its row's experts each is, by rising id."""
    return (weights != 0).cumsum(-1) - 1


def experts_scale(
    x: torch.Tensor, weights: torch.Tensor, vectors: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """x [rows, K] or [rows, num_slots, K] times its experts' vectors [experts, K] -> [rows,
    num_slots, K], in x's dtype; slots behind a row's last expert are zero."""
    at = slots(weights)
    out = torch.zeros(len(x), num_slots, x.shape[-1], dtype=x.dtype)
    for expert, vector in enumerate(vectors):
        rows = weights[:, expert].nonzero().flatten()
        out[rows, at[rows, expert]] = _of_slot(x, rows, at[rows, expert]) * vector.to(x.dtype)
    return out


def _of_slot(x: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[rows] if x.ndim == 2 else x[rows, at]


def experts_linear(
    x: torch.Tensor, weights: torch.Tensor, experts: Sequence[Linear], num_slots: int
) -> torch.Tensor:
    """x [rows, K] or [rows, num_slots, K] -> [rows, num_slots, O] by each slot's expert."""
    at = slots(weights)
    out: torch.Tensor | None = None
    for expert, linear in enumerate(experts):
        rows = weights[:, expert].nonzero().flatten()
        y = linear(_of_slot(x, rows, at[rows, expert]))
        if out is None:
            out = torch.zeros(len(x), num_slots, y.shape[-1], dtype=x.dtype)
        out[rows, at[rows, expert]] = y
    assert out is not None
    return out


def experts_up(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[Linear],
    num_slots: int,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, K], or [rows, num_slots, K] as ``experts_scale`` gives it, and weights [rows,
    experts] -> silu(gate) * up [rows, num_slots, I].

    Each of ``experts`` gives [gate, up] side by side, [rows, 2 I], to which ``added`` [rows,
    num_slots, 2 I] is added. Slot j is that of the row's j-th expert by rising id; slots
    behind a row's last are zero.
    """
    at = slots(weights)
    out: torch.Tensor | None = None
    for expert, linear in enumerate(experts):
        rows = weights[:, expert].nonzero().flatten()
        inputs = _of_slot(x, rows, at[rows, expert])
        both = linear(inputs).double()
        if added is not None:
            both = both + added[rows, at[rows, expert]].double()
        gate, up = both.chunk(2, dim=-1)
        if out is None:
            out = torch.zeros(len(x), num_slots, gate.shape[-1], dtype=x.dtype)
        out[rows, at[rows, expert]] = (gate * gate.sigmoid() * up).to(x.dtype)
    assert out is not None
    return out


def experts_down(h: torch.Tensor, weights: torch.Tensor, experts: Sequence[Linear]) -> torch.Tensor:
    """h [rows, slots, I] as from ``experts_up`` -> [rows, O]: each row's experts, weighted."""
    at = slots(weights)
    total: torch.Tensor | None = None
    for expert, linear in enumerate(experts):
        rows = weights[:, expert].nonzero().flatten()
        y = linear(h[rows, at[rows, expert]].double())
        if total is None:
            total = torch.zeros(len(h), y.shape[-1], dtype=torch.float64)
        total[rows] += weights[rows, expert, None].double() * y
    assert total is not None
    return total.to(h.dtype)
