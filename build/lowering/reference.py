"""The reference lowering: torch, one function per op, and the oracle of the others.

Every op computes in float64 and rounds its result once to the network's dtype, so
that a row does not depend on what shares its batch and other lowerings have one
clear number to come close to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trtree.build.network.network import Network, NetworkError, Op, State
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.causal_conv.reference import causal_conv
from trtree.plugins.gated_delta_net.reference import gated_delta_net
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.latent_cache import append as latent_append
from trtree.plugins.mla_attention.reference import head_linear, latent_attention
from trtree.plugins.moe import reference as moe
from trtree.plugins.moe.contract import Routing
from trtree.plugins.sparse_indexer.reference import index_select
from trtree.plugins.tree_attention import reference as attention
from trtree.plugins.tree_attention.contract import AttentionSegment, PagedKv

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

LinearImpl = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepContext:
    """What ops with state see of the current step.

    caches: KV by state name, ``latents`` likewise. committed: state that branches by name,
    [slots, ...]; the step's rows leave theirs, [rows, ...], in ``row_states``.
    """

    caches: Mapping[str, PagedKv]
    segments: Sequence[AttentionSegment]
    committed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    branches: Sequence[StateSegment] = ()
    row_states: dict[str, torch.Tensor] = field(default_factory=dict)
    latents: Mapping[str, LatentCache] = field(default_factory=dict)


class ReferenceNetwork:
    """A network with its weights, ready to run.

    Args:
        network: what to run.
        dense: dense weights by weight name, as stored.
        linears: an implementation per linear weight, float32 [rows, in] -> [rows, out].
        experts: likewise, one per expert of a weight that stacks them.
    """

    def __init__(
        self,
        network: Network,
        dense: Mapping[str, torch.Tensor],
        linears: Mapping[str, LinearImpl],
        experts: Mapping[str, Sequence[LinearImpl]] | None = None,
    ) -> None:
        unknown = sorted({op.kind for op in network.ops} - set(_OPS))
        if unknown:
            raise NetworkError(f"{network.name}: the reference lowering has no {unknown}")
        self.network = network
        self._dense = dense
        self._linears = linears
        self._experts = experts or {}
        self._constants = {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in network.constants.items()
        }
        self._last_use = _last_uses(network)

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        context: StepContext,
        observe: Callable[[Op, list[torch.Tensor]], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run all ops; returns the outputs by role. ``observe`` sees every op's results."""
        values = {name: inputs[name] for name in self.network.inputs}
        results = {}
        roles = {tensor: role for role, tensor in self.network.outputs.items()}
        for index, op in enumerate(self.network.ops):
            operands = [values[name] for name in op.inputs]
            outputs = _OPS[op.kind](self, op, operands, context)
            for name, value in zip(op.outputs, outputs, strict=True):
                values[name] = value
                if name in roles:
                    results[roles[name]] = value
            if observe:
                observe(op, outputs)
            for name in self._last_use[index]:
                values.pop(name, None)
        return results

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Round a wider result once to the network's dtype."""
        return x.to(TORCH_DTYPES[self.network.dtype])

    def dense(self, op: Op) -> torch.Tensor:
        return self._dense[op.weights[0]]

    def linear(self, op: Op) -> LinearImpl:
        return self._linears[op.weights[0]]

    def experts(self, op: Op) -> Sequence[LinearImpl]:
        return self._experts[op.weights[0]]

    def constant(self, name: str) -> torch.Tensor:
        return self._constants[name]


def paged_kv(state: State, num_pages: int, page_size: int) -> PagedKv:
    """An empty cache of a KV state's type and scales."""
    dtype = TORCH_DTYPES[state.dtype]
    k, v = (torch.zeros(num_pages, page_size, *state.shape, dtype=dtype) for _ in "kv")
    if dtype != torch.float8_e4m3fn:
        return PagedKv(k, v)
    k_scale, v_scale = (torch.full((state.heads,), s) for s in (state.k_scale, state.v_scale))
    return PagedKv(k, v, k_scale, v_scale)


def _last_uses(network: Network) -> list[list[str]]:
    """Per op, the tensors that no later op reads."""
    last = {}
    for index, op in enumerate(network.ops):
        for name in (*op.inputs, *op.outputs):
            last[name] = index
    released: list[list[str]] = [[] for _ in network.ops]
    for name, index in last.items():
        released[index].append(name)
    return released


Operands = list[torch.Tensor]
OpFunction = Callable[[ReferenceNetwork, Op, Operands, StepContext], list[torch.Tensor]]


def _embedding(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [net.round(net.dense(op)[x[0].long()])]


def _linear(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    dtype = TORCH_DTYPES[net.network.tensors[op.outputs[0]].dtype]
    return [net.linear(op)(x[0].to(dtype))]


def _route(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    bias = net.dense(op) if op.weights else None
    return [moe.route(x[0], Routing(**op.attrs), bias)]


def _experts_scale(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    vectors = net.dense(op).reshape(x[1].shape[1], -1)
    return [net.round(moe.experts_scale(x[0].double(), x[1], vectors, op.attrs["slots"]))]


def _experts_up(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    added = x[2] if len(x) > 2 else None
    return [moe.experts_up(x[0], x[1], net.experts(op), op.attrs["slots"], added)]


def _experts_linear(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [moe.experts_linear(x[0], x[1], net.experts(op), op.attrs["slots"])]


def _experts_down(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [moe.experts_down(x[0], x[1], net.experts(op))]


def _rms_norm(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    wide = x[0].double()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + op.attrs["eps"])
    return [net.round(wide * scale * net.dense(op).double())]


def _layer_norm(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    weight, bias = net.dense(op).double().chunk(2)
    wide = x[0].double()
    wide = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + op.attrs["eps"])
    return [net.round(wide * scale * weight + bias)]


def _rotary_embedding(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    wide, positions = x[0].double(), x[1]
    inv_freq = net.constant(op.attrs["inv_freq"])
    angle = positions.double()[:, None, None] * inv_freq
    cos, sin = angle.cos() * op.attrs["scaling"], angle.sin() * op.attrs["scaling"]
    rotary = 2 * len(inv_freq)
    turning, rest = wide[..., :rotary], wide[..., rotary:]
    if op.attrs["interleaved"]:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return [net.round(torch.cat([turned, rest], dim=-1))]


def _kv_append(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    k, v, slots = x
    attention.kv_append(step.caches[str(op.state)], k, v, slots, step.segments)
    return []


def _tree_attention(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    q, packed_mask, positions = x
    return [
        attention.tree_attention(
            step.caches[str(op.state)],
            q,
            packed_mask,
            positions,
            step.segments,
            scale=op.attrs["scale"],
            window=op.attrs["window"],
        )
    ]


def _latent_append(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    latent_append(step.latents[str(op.state)], x[0], x[1], step.segments)
    return []


def _index_select(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    q, weights, packed_mask = x
    cache = step.latents[str(op.state)]
    top_k = op.attrs["top_k"]
    return [index_select(cache, q, weights, packed_mask, step.segments, top_k=top_k)]


def _latent_attention(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    q, packed_mask, *selection = x
    cache, attrs = step.latents[str(op.state)], op.attrs
    return [
        latent_attention(
            cache,
            q,
            packed_mask,
            step.segments,
            selection[0] if selection else None,
            value_dim=attrs["value_dim"],
            scale=attrs["scale"],
        )
    ]


def _head_linear(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    attrs = op.attrs
    y = head_linear(
        x[0],
        net.dense(op),
        attrs["part"],
        key_dim=attrs["key_dim"],
        value_dim=attrs["value_dim"],
    )
    return [net.round(y)]


def _causal_conv(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    name = str(op.state)
    weight = net.dense(op).reshape(-1, op.attrs["kernel"])
    y, step.row_states[name] = causal_conv(x[0], weight, step.committed[name], step.branches)
    return [y]


def _gated_delta_net(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    name = str(op.state)
    q, k, v, a, b, _ = x
    y, step.row_states[name] = gated_delta_net(
        q, k, v, a, b, net.dense(op), step.committed[name], step.branches
    )
    return [y]


def _sigmoid_mul(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [net.round(x[0].double() * x[1].double().sigmoid())]


def _scale(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [net.round(x[0].double() * net.dense(op).double())]


def _silu_mul(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    gate, up = x[0].double(), x[1].double()
    return [net.round(gate * torch.sigmoid(gate) * up)]


def _add(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [net.round(x[0].double() + x[1].double())]


def _split(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return list(torch.split(x[0], op.attrs["sizes"], dim=-1))


def _concat(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [torch.cat(x, dim=-1)]


def _reshape(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    shape = net.network.tensors[op.outputs[0]].shape
    return [x[0].reshape([len(x[0]), *(int(dim) for dim in shape[1:])])]


def _gather_rows(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    return [x[0][x[1].long()]]


def _argmax(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    _refuse_nan(op, x[0])
    # numpy's argmax is the first of equal maxima; torch's may be any of them.
    return [torch.from_numpy(x[0].float().numpy().argmax(axis=-1)).int()]


def _top_k_log_probs(net: ReferenceNetwork, op: Op, x: Operands, step: StepContext) -> Operands:
    logits = x[0].float()
    _refuse_nan(op, logits)
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ids = order.indices[:, : op.attrs["k"]]
    lse = torch.logsumexp(logits.double(), dim=-1, keepdim=True).float()
    mapped = ids + net.dense(op).long()[ids] if op.weights else ids
    return [logits.gather(-1, ids) - lse, mapped.int()]


def _refuse_nan(op: Op, logits: torch.Tensor) -> None:
    bad = torch.isnan(logits).any(dim=-1).nonzero().flatten()
    if len(bad):
        raise FloatingPointError(
            f"{op.name}: NaN in the logits of output row {int(bad[0])}; "
            "a weight or an activation overflowed"
        )


_OPS: dict[str, OpFunction] = {
    "add": _add,
    "argmax": _argmax,
    "causal_conv": _causal_conv,
    "concat": _concat,
    "embedding": _embedding,
    "experts_down": _experts_down,
    "experts_linear": _experts_linear,
    "experts_scale": _experts_scale,
    "experts_up": _experts_up,
    "gated_delta_net": _gated_delta_net,
    "gather_rows": _gather_rows,
    "head_linear": _head_linear,
    "index_select": _index_select,
    "kv_append": _kv_append,
    "latent_append": _latent_append,
    "latent_attention": _latent_attention,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "reshape": _reshape,
    "rms_norm": _rms_norm,
    "rotary_embedding": _rotary_embedding,
    "route": _route,
    "scale": _scale,
    "sigmoid_mul": _sigmoid_mul,
    "silu_mul": _silu_mul,
    "split": _split,
    "top_k_log_probs": _top_k_log_probs,
    "tree_attention": _tree_attention,
}
