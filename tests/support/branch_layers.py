"""What the plugin layers of state that branches compute, see plugin_layers.py."""

from collections.abc import Callable
from typing import Any

import torch

from attention_layers import Tensors
from trtree.plugins.gated_delta_net.reference import UNIT_EPS


def _causal_conv(layer: Any, x: Tensors) -> list[torch.Tensor]:
    """Of each row of somebody's: silu of its inputs, from the window and the step's rows."""
    kernel = layer.config.kernel
    weight = x["weight"].double().reshape(-1, kernel)
    out = torch.full(x["x"].shape, torch.nan, dtype=torch.float64)
    for owner, (first, _, slot, fresh) in enumerate(x["requests"].tolist()):
        rows = x["owners"] == owner
        window = x["window"][slot].double()
        both = torch.cat([torch.zeros_like(window) if fresh else window, x["x"][first:].double()])
        total = torch.einsum("rtc,ct->rc", both[x["inputs"][rows].long()], weight)
        out[rows] = total * total.sigmoid()
    return [out]


def _decay(layer: Any, x: Tensors) -> list[torch.Tensor]:
    a_log, dt_bias = x["gates"].double().reshape(2, -1)
    g = -a_log.exp() * torch.nn.functional.softplus(x["a"].double() + dt_bias)
    decay = torch.full(g.shape, torch.nan, dtype=torch.float64)
    for first, num_rows, _, _ in x["requests"].tolist():
        rows = slice(first, first + num_rows)
        decay[rows] = _sees(x, rows).double() @ g[rows]
    return [decay]


def _delta_net(layer: Any, x: Tensors) -> list[torch.Tensor]:
    """Per request and value head the closed form of build/lowering/tensorrt/branch.py, its
    triangular system solved."""
    config = layer.config
    update = torch.full(x["v"].shape, torch.nan, dtype=torch.float64)
    out = update.clone()
    for first, num_rows, slot, fresh in x["requests"].tolist():
        rows = slice(first, first + num_rows)
        sees = _sees(x, rows)
        q, k = (
            _unit(x[name][rows].double()).repeat_interleave(config.group, dim=1).transpose(0, 1)
            for name in "qk"
        )
        q = q * config.key_dim**-0.5
        v, beta = (x[name][rows].double().transpose(0, 1) for name in "vb")
        beta, decay = beta.sigmoid()[..., None], x["decay"][rows].double().T  # [heads, rows]
        state = x["state"][slot].double() * (0.0 if fresh else 1.0)
        between = (decay[:, :, None] - decay[:, None, :]).masked_fill(~sees, -torch.inf).exp()
        coupling = beta * between * (k @ k.mT)
        system = coupling.tril(-1) + torch.eye(num_rows, dtype=torch.float64)
        shrink = decay.exp()[..., None]
        target = beta * (v - shrink * (k @ state))
        u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        update[rows] = u.transpose(0, 1)
        out[rows] = (shrink * (q @ state) + (between * (q @ k.mT)) @ u).transpose(0, 1)
    return [update, out]


def _sees(x: Tensors, rows: slice) -> torch.Tensor:
    """bool [rows, rows]: by packed mask, which rows of its own request each sees."""
    other = torch.arange(rows.stop - rows.start)
    words = x["packed_mask"][rows][:, other // 32].long()
    return ((words >> (other % 32)) & 1) == 1


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt()


LAYERS: dict[str, Callable[[Any, Tensors], list[torch.Tensor]]] = {
    "causal_conv": _causal_conv,
    "gated_delta_decay": _decay,
    "gated_delta_net": _delta_net,
}
