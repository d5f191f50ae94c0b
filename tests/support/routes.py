"""Routes worked out by hand, for every implementation of routing."""

from typing import Any

import numpy as np
import torch

from trtree.plugins.moe.contract import Routing


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


# name: routing, logits, bias, the chosen experts' unnormalized scores by id
ROUTES: dict[str, tuple[Routing, list[float], list[float] | None, dict[int, float]]] = {
    "softmax": (
        Routing(4, 2),
        [0.0, np.log(3.0), np.log(2.0), -50.0],
        None,
        {1: 3.0, 2: 2.0},
    ),
    "not-normalized": (
        Routing(3, 1, normalize=False),
        [0.0, np.log(2.0), 0.0],
        None,
        {1: 0.5},
    ),
    "ties-go-to-the-lower-expert": (
        Routing(5, 3),
        [1.0, 2.0, 2.0, 2.0, 2.0],
        None,
        {1: 1.0, 2: 1.0, 3: 1.0},
    ),
    "all-experts": (
        Routing(3, 3, normalize=False),
        [0.0, 0.0, 0.0],
        None,
        dict.fromkeys(range(3), 1 / 3),
    ),
    "sigmoid-scaled": (
        Routing(3, 2, "sigmoid", scale=2.5),
        [1.0, -1.0, 0.5],
        None,
        {0: sigmoid(1.0), 2: sigmoid(0.5)},
    ),
    # The bias brings 1 in and is not part of its weight.
    "bias-chooses-but-does-not-weigh": (
        Routing(3, 2, "sigmoid", normalize=False),
        [1.0, -1.0, 0.5],
        [0.0, 0.9, 0.0],
        {0: sigmoid(1.0), 1: sigmoid(-1.0)},
    ),
    # Groups {0,1} {2,3} {4,5} are worth 0.6, 0.55 and 0.5 by bias: 4 would be the best.
    "groups": (
        Routing(6, 2, "sigmoid", normalize=False, groups=3, top_groups=2),
        [0.0] * 6,
        [0.3, 0.3, 0.5, 0.05, 0.52, -0.02],
        {0: 0.5, 2: 0.5},
    ),
    "equal-groups-go-to-the-lower": (
        Routing(6, 2, "sigmoid", normalize=False, groups=3, top_groups=1),
        [0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        None,
        {2: sigmoid(1.0), 3: sigmoid(1.0)},
    ),
    # A candidate below zero still beats experts of closed groups.
    "negative-choices": (
        Routing(4, 2, "sigmoid", normalize=False, groups=2, top_groups=1),
        [0.0] * 4,
        [-2.0, -2.0, -3.0, -1.9],
        {0: 0.5, 1: 0.5},
    ),
}


def check_route(route: Any, case: str) -> None:
    routing, logits, bias, scores = ROUTES[case]
    divisor = sum(scores.values()) if routing.normalize else 1.0
    expected = torch.zeros(routing.experts)
    for expert, score in scores.items():
        expected[expert] = score / divisor * routing.scale
    given = torch.tensor([logits, logits[::-1], logits], dtype=torch.float32)
    biases = None if bias is None else torch.tensor(bias)
    got = route(given, routing, biases)
    torch.testing.assert_close(got[0], expected, rtol=1e-6, atol=0)
    assert torch.equal(got[0], got[2])
    assert got.dtype == torch.float32
