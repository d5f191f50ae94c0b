"""The CPU engine's ops, each compared with the reference's on the same inputs."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from steps import prefill, random_tree, run_rows
from trtree import _core
from trtree.build.lowering.reference import _OPS, StepContext, paged_kv
from trtree.plugins import branch_state
from trtree.plugins.branch_state import StateSegment
from trtree.plugins.latent_cache import LatentCache
from trtree.plugins.tree_attention.contract import AttentionSegment

PAGES = [9, 3, 14, 0, 7, 5, 12, 2]


class OpByOp:
    """Feeds what a CPU engine gave each op to the reference's op, and compares results."""

    def __init__(self, engine: Any, reference: Any, page_size: int = 16) -> None:
        self._engine = engine
        self._networks = reference.networks
        self._caches = {
            name: paged_kv(s, 256, page_size)
            for network in self._networks.values()
            for name, s in network.network.states.items()
            if s.kind == "kv"
        }
        # State that branches, of one request; CPU and reference each keep their own.
        self._committed = {
            name: torch.zeros(1, *s.shape)
            for network in self._networks.values()
            for name, s in network.network.states.items()
            if not s.paged
        }
        self._latents = {
            name: LatentCache(torch.zeros(256, page_size, s.head_dim))
            for network in self._networks.values()
            for name, s in network.network.states.items()
            if s.kind == "latent"
        }
        self._row_states: dict[str, torch.Tensor] = {}
        self._branch = StateSegment(0, 0, 0, True, [])
        self.worst: dict[str, float] = {}
        self.rows: dict[str, dict[str, torch.Tensor]] = {}  # integer inputs by network
        self.segments: dict[str, list[AttentionSegment]] = {}
        engine.observe(self)

    def __call__(self, network: str, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        net = self._networks[network]
        op = next(op for op in net.network.ops if op.name == name)
        floats = iter(inputs)
        operands = []
        for operand in op.inputs:
            tensor = net.network.tensors[operand]
            if operand in self.rows[network]:
                operands.append(self.rows[network][operand])
            elif tensor.dtype == "int32":  # a selection
                operands.append(torch.from_numpy(next(floats)).view(torch.int32))
            else:
                shape = [-1, *map(int, tensor.shape[1:])]
                operands.append(torch.from_numpy(next(floats)).reshape(shape))
        context = StepContext(
            self._caches,
            self.segments[network],
            self._committed,
            [self._branch],
            self._row_states,
            self._latents,
        )
        expected = _OPS[op.kind](net, op, operands, context)
        if op.kind == "top_k_log_probs":  # terminal: compared through draft()
            return
        if op.kind == "index_select":  # equal or not
            unequal = (outputs[0].view(np.int32) != expected[0].numpy()).sum()
            self.worst[op.kind] = max(self.worst.get(op.kind, 0.0), float(unequal))
            return
        for theirs, ours in zip(expected, outputs, strict=False):
            reference = theirs.reshape(len(ours), -1).numpy()
            error = float(np.abs(ours - reference).max() / np.abs(reference).max())
            self.worst[op.kind] = max(self.worst.get(op.kind, 0.0), error)

    def prompt_and_tree(self, vocab: int, prompt_length: int = 37) -> None:
        """A prompt, and a step of a tree of 50 nodes behind it."""
        rng = random.Random(0)
        prompt = [rng.randrange(vocab) for _ in range(prompt_length)]
        self.rows_of(0, prompt, list(range(-1, prompt_length - 1)), PAGES)
        prefill(self._engine, _core.Sequence(1, 0, 0, PAGES), prompt)
        self._commit(range(prompt_length))
        tokens, parents = random_tree(rng, 50, vocab)
        self.rows_of(prompt_length, tokens, parents, PAGES)
        at = _core.Sequence(1, 0, prompt_length, PAGES)
        run_rows(self._engine, [(at, tokens, parents)])

    def _commit(self, rows: Sequence[int]) -> None:
        """The engine committed these rows of the step before."""
        for name, states in self._row_states.items():
            branch_state.commit(self._committed[name], states, self._branch, rows)

    def rows_of(
        self, prefix: int, tokens: list[int], parents: list[int], pages: Sequence[int]
    ) -> None:
        """The next step of the target runs these rows behind ``prefix``."""
        at = _core.Sequence(1, 0, prefix, list(pages))
        outputs = list(range(len(tokens)))
        batch = _core.RowBatch([_core.SegmentRequest(at, tokens, parents, outputs)])
        rows = {
            "token_ids": torch.tensor(batch.token_ids),
            "parents": torch.tensor(batch.parents),
            "positions": torch.tensor(batch.positions),
            "slots": torch.arange(prefix, prefix + len(tokens), dtype=torch.int32),
            "packed_mask": torch.tensor(batch.packed_mask).reshape(len(tokens), -1),
            "output_rows": torch.tensor(batch.output_rows),
        }
        self._branch = StateSegment(0, len(tokens), 0, prefix == 0, parents)
        segment = [AttentionSegment(0, len(tokens), prefix, torch.tensor(list(pages)))]
        self.rows |= {"target": rows, "drafter_context": rows}
        self.segments |= {"target": segment, "drafter_context": segment}
