"""What an engine will need on one GPU, from its networks alone."""

import math
from dataclasses import dataclass

from trtree.build.lowering.tensorrt.backend import Sizes
from trtree.build.lowering.tensorrt.context import BATCH, OUTPUTS, ROWS, Profile
from trtree.build.lowering.tensorrt.paged_sizes import PagedSizes
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.network import Network, Op, Tensor

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}


def kv_bytes(network: Network, sizes: Sizes, encoding: Encoding) -> int:
    """The caches of all of a network's layers, one rank's heads."""
    shard = encoding.shard
    per_slot = sum(shard.state(s).token_bytes for s in network.states.values() if s.paged)
    return sizes.kv_slots * per_slot


@dataclass(frozen=True)
class Workspace:
    """Estimates, in bytes, for the largest profile.

    activations: most that lives between ops at once, and attention's own. logits: their copy in
    float32, which argmax and top-k read. widened: the largest weight that is rewritten to
    bf16 at run time.
    """

    activations: int
    logits: int
    widened: int


def workspace(network: Network, sizes: Sizes, encoding: Encoding) -> Workspace:
    """A network's own estimate; TensorRT reports its figure once the engine is built."""
    profiles = sizes.profiles(network, encoding.shard)
    return Workspace(
        max(
            _peak(network, profile, encoding)
            + max(
                _attention(network, profile, sizes, encoding),
                0 if isinstance(sizes, PagedSizes) else _coupling(network, profile, encoding),
            )
            for profile in profiles
        ),
        max(_logits(network, profile, encoding) for profile in profiles),
        _widened(network, encoding),
    )


def _peak(network: Network, profile: Profile, encoding: Encoding) -> int:
    last = {name: index for index, op in enumerate(network.ops) for name in op.inputs}
    last |= {name: len(network.ops) for name in network.outputs.values()}
    live: dict[str, int] = {}
    peak = total = 0
    for index, op in enumerate(network.ops):
        for name in op.outputs:
            live[name] = _tensor_bytes(network.tensors[name], profile, encoding)
            if op.weights and network.weights[op.weights[0]].activations == "nvfp4":
                live[name] *= 2  # W4A4 products come out in float32
        passing = 0
        if op.kind.startswith("experts_"):
            passing, result = _of_every_expert(network, op, profile, encoding)
            live[op.outputs[0]] = result or live[op.outputs[0]]
        total += sum(live[name] for name in op.outputs)
        peak = max(peak, total + passing)
        # Results that nothing reads end where they begin.
        ended = [name for name in {*op.inputs, *op.outputs} if last.get(name, -1) <= index]
        total -= sum(live.pop(name, 0) for name in ended)
    return peak


def _of_every_expert(
    network: Network, op: Op, profile: Profile, encoding: Encoding
) -> tuple[int, int]:
    """All experts compute all rows: their products in float32, and what ops but
    ``experts_down``, which sums them, make of them in bf16 (``experts_up`` half as many)."""
    weight = network.weights[op.weights[0]]
    # A vector for every expert, or a matrix.
    each = weight.shape[0] if op.kind == "experts_scale" else weight.experts * weight.shape[1]
    numbers = profile.sizes[BATCH][2] * profile.sizes[ROWS][2] * each
    if op.kind == "experts_down":
        return 4 * numbers, 0
    if op.attrs.get("parallel") == "column":
        numbers //= encoding.shard.size
    return 4 * numbers, numbers if op.kind == "experts_up" else 2 * numbers


def _attention(network: Network, profile: Profile, sizes: Sizes, encoding: Encoding) -> int:
    """The mask, bool [B, W, S], and an indexer's products, float32 [B, heads, W, S]; or the
    plugins' partial results, float32 [items, KV heads, block_m, D + 1], or an indexer's scores,
    float32 [rows, S], of one layer."""
    if not isinstance(sizes, PagedSizes):
        index_heads = [
            int(network.tensors[op.inputs[0]].shape[1])
            for op in network.ops
            if op.kind == "index_select" and sizes.cache_length > op.attrs["top_k"]
        ]
        each = 1 + 4 * max(index_heads, default=0)
        return each * profile.sizes[BATCH][2] * profile.sizes[ROWS][2] * sizes.cache_length
    widest = max((state.head_dim for state in network.states.values()), default=0)
    scores = 4 * sizes.rows(network.name) * sizes.table_width * sizes.page_size
    return max(
        (
            4 * plan.max_items * plan.kv_heads * plan.block_m * (widest + 1)
            if plan.merged
            else scores
            for plan in sizes.plans(network, encoding.shard).values()
        ),
        default=0,
    )


def _coupling(network: Network, profile: Profile, encoding: Encoding) -> int:
    """The gated delta rule's float32 [B, value heads, W, W]: D, A, its inverse, and products."""
    values = [op.inputs[2] for op in network.ops if op.kind == "gated_delta_net"]
    heads = max((int(network.tensors[name].shape[1]) for name in values), default=0)
    requests, rows = (profile.sizes[size][2] for size in (BATCH, ROWS))
    return 5 * 4 * requests * rows**2 * heads // encoding.shard.size


def _logits(network: Network, profile: Profile, encoding: Encoding) -> int:
    wide = [op for op in network.ops if op.kind in ("argmax", "top_k_log_probs")]
    sizes = [_tensor_bytes(network.tensors[op.inputs[0]], profile, encoding) for op in wide]
    return max((2 * size for size in sizes), default=0)


def _widened(network: Network, encoding: Encoding) -> int:
    """FP4 activations take FP4 weights as they are; bf16 ones need the weight in bf16."""
    return max(
        (
            2 * math.prod(weight.shape) // encoding.shard.size
            for weight in network.weights.values()
            if weight.kind == "nvfp4" and weight.activations != "nvfp4"
        ),
        default=0,
    )


def _tensor_bytes(tensor: Tensor, profile: Profile, encoding: Encoding) -> int:
    """On one rank. Logits are divided among ranks; other features are counted whole, which
    is more than they take."""
    rows = OUTPUTS if tensor.shape[0] == "outputs" else ROWS
    count = profile.sizes[BATCH][2] * profile.sizes[rows][2]
    for dim in tensor.shape[1:]:
        count *= int(dim)
    if rows == OUTPUTS and tensor.name == "lm_head":
        count //= encoding.shard.size
    return count * _ITEM_BYTES[tensor.dtype]
