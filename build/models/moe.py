"""The sparse MLP that families with experts share: router, experts, shared expert."""

from trtree.build.models.qwen3 import gated_mlp
from trtree.build.network.graph import Graph
from trtree.build.network.network import NetworkError, Tensor
from trtree.plugins.moe.contract import Routing, Scores


def read_routing(
    *,
    experts: int,
    top_k: int,
    scores: Scores,
    normalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """A Routing of config.json's numbers.

    Raises:
        NetworkError: they do not fit each other.
    """
    try:
        return Routing(experts, top_k, scores, normalize, scale, groups, top_groups)
    except ValueError as error:
        keys = f"num_experts_per_tok {top_k}"
        keys += f", n_group {groups} and topk_group {top_groups}" if groups > 1 else ""
        raise NetworkError(f"config.json: {error}; correct {keys}") from None


def sparse_mlp(
    g: Graph,
    h: Tensor,
    routing: Routing,
    intermediate: int,
    hidden: int,
    *,
    correction_bias: bool = False,
    shared_intermediate: int = 0,
    gated_shared: bool = False,
) -> Tensor:
    """h [rows, hidden] -> the weighted sum of each row's experts, plus the shared one's.

    ``gated_shared``: the shared expert has a sigmoid gate of its own, and goes by the
    singular in checkpoints.
    The router's logits stay in float32: rounded to bf16 they would tie.
    """
    with g.scope("mlp"):
        logits = g.linear("gate", h, routing.experts, dtype="float32")
        bias = "gate.e_score_correction_bias" if correction_bias else None
        weights = g.route("route", logits, routing, correction_bias=bias)
        experts = range(routing.experts)
        gate_up = [f"experts.{i}.{which}_proj" for i in experts for which in ("gate", "up")]
        activated = g.experts_up(gate_up, h, weights, intermediate, routing.top_k)
        down = [f"experts.{i}.down_proj" for i in experts]
        routed = g.experts_down(down, activated, weights, hidden)
        if not shared_intermediate:
            return routed
        scope = "shared_expert" if gated_shared else "shared_experts"
        shared = gated_mlp(g, h, shared_intermediate, hidden, scope=scope)
        if gated_shared:
            gate = g.linear("shared_expert_gate", h, 1)
            shared = g.sigmoid_mul("gated_shared", shared, gate)
        return g.add("with_shared", routed, shared)
