"""Networks lowered with attention plugins beside the reference, op by op and whole."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engines import random_checkpoint
from lowered import describe, evaluators, lower_networks, recorded, references
from network_evaluator import NetworkEvaluator
from op_checks import check_op, steps_apart
from paged_batch import PagedBatch, make_paged_batch, ragged_forced, ragged_names
from trtree.build.builder import EngineDescription
from trtree.build.lowering.reference import ReferenceNetwork, StepContext
from trtree.build.lowering.tensorrt.lower import LoweredNetwork
from trtree.build.network.graph import WeightInfo
from trtree.build.network.network import Network, Owner
from trtree.build.options import BuildOptions

TREE = [-1, 0, 0, 1, 1, 2, -1, 6]


@dataclasses.dataclass
class Pair:
    lowered: LoweredNetwork
    evaluator: NetworkEvaluator
    reference: ReferenceNetwork

    def batch(self, kind: str, *, length: int = 300) -> PagedBatch:
        """A prefill chunk, or trees and a single row; prefixes of more than one work item."""
        parents = [[-1, 0, 1, 2, 3, 4]] if kind == "prefill" else [TREE, [-1], TREE[:3]]
        generator = torch.Generator().manual_seed(len(kind))
        ids = [torch.randint(0, 90, (len(p),), generator=generator).tolist() for p in parents]
        lengths = [9] if kind == "prefill" else [7, 0, length]
        states = self.reference.network.states
        return make_paged_batch(self.lowered, lengths, ids, parents, states)


class NoWeights:
    """For graphs of inputs alone."""

    def describe(self, module: str, owner: Owner, implied: tuple[int, ...]) -> WeightInfo:
        raise AssertionError(module)


def pairs_of(description: EngineDescription, directory: Path) -> dict[str, Pair]:
    directory.mkdir(exist_ok=True)
    lowered = lower_networks(description)
    evaluated = evaluators(lowered)
    loaded = references(description, directory)
    return {name: Pair(lowered[name], evaluated[name], loaded[name]) for name in lowered}


def tiny(directory: Path, config: dict[str, Any], **changes: Any) -> EngineDescription:
    checkpoint = directory / "checkpoint"
    if not checkpoint.exists():
        random_checkpoint(checkpoint, config, algorithm=None)
    options = BuildOptions(checkpoint=checkpoint, max_seq_len=200, kv_tokens=1000, max_num_rows=128)
    paged = {"backend": "tensorrt", "attention": "plugin", "max_seq_len": 256}
    return describe(options, **paged | changes)


def check_ops(pair: Pair, batch: PagedBatch, **more: torch.Tensor) -> set[str]:
    """Every op on the reference's inputs, and the caches afterwards; the kinds compared."""
    context = batch.context()
    given = {**batch.reference_inputs(), **more}
    want = recorded(pair.reference, given, context)
    network = pair.reference.network
    inputs = batch.ragged_inputs(pair.lowered, **more)
    got = pair.evaluator.run(inputs, ragged_forced(pair.lowered, network, batch, want))
    checked, ragged = set(), ragged_names(network)
    for op in network.ops:
        weights = [network.weights[name] for name in op.weights]
        rounds_twice = any(w.activations == "bf16" or w.has_bias for w in weights)
        for name in op.outputs:
            if name not in pair.lowered.tensors:
                continue  # turned keys, which lie in the cache alone
            computed = got[pair.lowered.tensors[name]]
            computed = computed if name in ragged else computed[0]
            # What append turned differs from the graph's as RoPE may, whatever carried it there.
            turned = op.kind == "concat" and name in turned_names(network)
            as_op = dataclasses.replace(op, kind="rotary_embedding") if turned else op
            check_op(as_op, rounds_twice, computed[: batch.num_rows], want[name])
            checked.add(op.kind)
    check_caches(inputs, context)
    return checked


def check_caches(inputs: dict[str, torch.Tensor], context: StepContext) -> None:
    """Every element of every page, of nobody's too; keys are turned by other arithmetic."""
    turned = {f"{name}.k": cache.k for name, cache in context.caches.items()}
    turned |= {f"{name}.latent": cache.vectors for name, cache in context.latents.items()}
    for name, cache in context.caches.items():
        assert torch.equal(inputs[f"{name}.v"].float(), cache.v.float()), name
    for name, expected in turned.items():
        apart = steps_apart(inputs[name], expected)
        assert apart.max() <= 1, name
        assert (apart > 0).double().mean() < 1e-3, name


def turned_names(network: Network) -> set[str]:
    """What holds rotated numbers beside others."""
    turned = {name for op in network.ops if op.kind == "rotary_embedding" for name in op.outputs}
    return {
        name
        for op in network.ops
        if op.kind == "concat" and not turned.isdisjoint(op.inputs)
        for name in op.outputs
    }


def whole(
    pair: Pair,
    kind: str,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
    *,
    length: int = 300,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of both; ``change`` spoils the lowered network's inputs."""
    batch = pair.batch(kind, length=length)
    inputs = batch.ragged_inputs(pair.lowered)
    change(inputs)
    got = pair.evaluator.run(inputs)["output.logits"][0]
    return got, pair.reference.run(batch.reference_inputs(), batch.context())["logits"]
