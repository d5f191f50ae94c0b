"""Routing as TensorRT layers, evaluated: hand-computed routes, ties, and planted faults."""

from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt
import torch

from implied_weights import ImpliedWeights
from network_evaluator import NetworkEvaluator
from planted import plant
from routes import ROUTES, check_route
from trtree.build.lowering.tensorrt import experts
from trtree.build.lowering.tensorrt.lower import lower
from trtree.build.lowering.tensorrt.ops import OPS
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.graph import Graph
from trtree.plugins.moe import reference
from trtree.plugins.moe.contract import Routing

KEEP: list[Any] = []  # builders have to outlive what they built


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, experts] as two requests of half the rows, or one."""
    g = Graph("target", ImpliedWeights())
    x = g.input("logits", ("rows", routing.experts), "float32")
    weights = g.route("route", x, routing, correction_bias=None if bias is None else "bias")
    g.output("weights", weights)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    constants = {} if bias is None else {"target:bias.weight": bias}
    lowered = lower(trt, builder, g.network, Encoding(), constants, 8)
    KEEP.append((builder, lowered))
    evaluator = NetworkEvaluator(trt, lowered.definition, lowered.constants)
    requests = 1 + (len(logits) % 2 == 0)
    values = evaluator.run({"logits": logits.reshape(requests, -1, routing.experts)})
    return values["output.weights"].flatten(0, 1)


@pytest.mark.parametrize("case", ROUTES)
def test_routes_by_hand(case: str) -> None:
    check_route(route, case)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(8, 3),
        Routing(8, 8, normalize=False),
        Routing(16, 4, "sigmoid", scale=2.5),
        Routing(16, 4, "sigmoid", groups=4, top_groups=2),
        Routing(12, 2, "sigmoid", normalize=False, groups=3, top_groups=1),
    ],
    ids=str,
)
def test_ties_go_to_the_lower_expert(routing: Routing) -> None:
    """Scores in steps of one, so that most rows hold ties."""
    generator = torch.Generator().manual_seed(routing.experts + routing.top_k)
    logits = torch.randn(64, routing.experts, generator=generator).round()
    bias = None
    if routing.scores == "sigmoid":
        bias = torch.randn(routing.experts, generator=generator).round()
    want = reference.route(logits, routing, bias)
    got = route(logits, routing, bias)
    assert torch.equal(got != 0, want != 0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("old", "new", "case"),
    [
        ("torch.triu(torch.ones(1, size, size), diagonal=1)",
         "torch.tril(torch.ones(1, size, size), diagonal=-1)", "ties-go-to-the-lower-expert"),
        ('choice = emit.binary("biased", "SUM", scores, bias)',
         'choice = scores = emit.binary("biased", "SUM", scores, bias)',
         "bias-chooses-but-does-not-weigh"),
        ('    if routing.normalize:\n        kept', '    if False:\n        kept', "softmax"),
        ("emit.network.add_topk(grouped, kind, 2, 1 << 3)",
         "emit.network.add_topk(grouped, kind, 1, 1 << 3)", "groups"),
        ("emit.scalar(-torch.inf, 4)", "emit.scalar(0.0, 4)", "negative-choices"),
    ],
)  # fmt: skip
def test_planted_faults_show(
    old: str, new: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = plant(experts, old, new, tmp_path)
    monkeypatch.setitem(OPS, "route", faulty.route)
    with pytest.raises(AssertionError):
        check_route(route, case)
