"""What an engine will need on one GPU, from its networks alone."""

import math
from dataclasses import dataclass

from trtree.build.lowering.tensorrt.backend import EngineSizes
from trtree.build.lowering.tensorrt.compile import Profile
from trtree.build.lowering.tensorrt.context import BATCH, OUTPUTS, ROWS
from trtree.build.lowering.tensorrt.weights import Encoding
from trtree.build.network.network import Network, Op, Tensor

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}


def kv_bytes(network: Network, sizes: EngineSizes, encoding: Encoding) -> int:
    """The caches of all of a network's layers, one rank's heads."""
    slots = sizes.max_batch_size * sizes.cache_length
    return sum(
        2 * slots * encoding.shard.part(s.heads, s.name) * s.head_dim * _ITEM_BYTES[s.dtype]
        for s in network.states.values()
    )


@dataclass(frozen=True)
class Workspace:
    """Estimates, in bytes, for the largest profile.

    activations: most that lives between ops at once, and the mask. logits: their copy in
    float32, which argmax and top-k read. widened: the largest weight that is rewritten to
    bf16 at run time.
    """

    activations: int
    logits: int
    widened: int


def workspace(network: Network, sizes: EngineSizes, encoding: Encoding) -> Workspace:
    """A network's own estimate; TensorRT reports its figure once the engine is built."""
    profiles = sizes.profiles(network.name)
    return Workspace(
        max(
            _peak(network, profile, encoding) + _mask(profile, sizes.cache_length)
            for profile in profiles
        ),
        max(_logits(network, profile, encoding) for profile in profiles),
        _widened(network, encoding),
    )


def _peak(network: Network, profile: Profile, encoding: Encoding) -> int:
    last = {name: index for index, op in enumerate(network.ops) for name in op.inputs}
    last |= {name: len(network.ops) for name in network.outputs.values()}
    live: dict[str, int] = {}
    peak = 0
    for index, op in enumerate(network.ops):
        for name in op.outputs:
            live[name] = _tensor_bytes(network.tensors[name], profile, encoding)
            if op.weights and network.weights[op.weights[0]].activations == "nvfp4":
                live[name] *= 2  # W4A4 products come out in float32
        passing = 0
        if op.kind in ("experts_up", "experts_down"):
            passing, result = _of_every_expert(network, op, profile, encoding)
            live[op.outputs[0]] = result or live[op.outputs[0]]
        peak = max(peak, sum(live.values()) + passing)
        live = {name: size for name, size in live.items() if last.get(name, -1) > index}
    return peak


def _of_every_expert(
    network: Network, op: Op, profile: Profile, encoding: Encoding
) -> tuple[int, int]:
    """All experts compute all rows: their products in float32, and what ``experts_up`` makes
    of them in bf16 (0 for ``experts_down``, which sums them)."""
    weight = network.weights[op.weights[0]]
    rows = profile.sizes[BATCH][2] * profile.sizes[ROWS][2]
    numbers = rows * weight.experts * weight.shape[1]
    if op.kind == "experts_down":
        return 4 * numbers, 0
    return 4 * numbers // encoding.shard.size, numbers // encoding.shard.size


def _mask(profile: Profile, cache_length: int) -> int:
    """bool [B, W, S]."""
    return profile.sizes[BATCH][2] * profile.sizes[ROWS][2] * cache_length


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
