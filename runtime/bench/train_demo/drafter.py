"""Training of the drafter on the quantized target's own answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data import MASK, Rows
from .model import BLOCK_SIZE, DRAFTER, TAPS, Drafter, Shape, Target
from .target import optimizers, schedule, set_rate
from .workers import average_gradients, run_workers


@dataclass(frozen=True)
class DrafterRecipe:
    """`steps` of `batch` rows for each worker, with `anchors` rounds in each row.

    A slot weighs `slot_decay` times the one before; the loss is for `token_share` the
    cross-entropy of the target's token, else of its distribution.
    """

    steps: int = 400
    batch: int = 6
    anchors: int = 32
    workers: int = 2
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 20
    decay: float = 0.7
    slot_decay: float = 0.9
    token_share: float = 0.5
    seed: int = 2


@dataclass(frozen=True)
class States:
    """What the target computes over rows: tapped residuals captured [n, T, taps*H] and normed
    last states hidden [n, T, H], both bf16."""

    captured: Tensor
    hidden: Tensor


@torch.no_grad()
def read(target: Target, ids: Tensor) -> States:
    """The target's states over ids [n, T]."""
    found = []
    for part in torch.split(ids, 8):
        with torch.autocast("cpu", torch.bfloat16):
            hidden, captured = target(part, TAPS)
        found.append((captured.bfloat16(), hidden.bfloat16()))
    captured, hidden = zip(*found, strict=True)
    return States(torch.cat(captured), torch.cat(hidden))


@dataclass(frozen=True)
class Rounds:
    """picks [B], the rows; seeds [B, A]; anchors [B, A], the seeds' positions; labels
    [B, A, S-1], -1 behind the answer's end."""

    picks: Tensor
    seeds: Tensor
    anchors: Tensor
    labels: Tensor


def draw(rows: Rows, batch: int, count: int, generator: torch.Generator) -> Rounds:
    """`count` rounds in the answers of each of `batch` rows drawn by chance."""
    picks = torch.randperm(len(rows.ids), generator=generator)[:batch]
    ids = torch.from_numpy(rows.ids[picks.numpy()].astype(np.int64))
    answers = torch.from_numpy(rows.answers[picks.numpy()])
    # A round needs a seed and one more token of the answer.
    seeds = (answers[:, :-1] & answers[:, 1:]).float()
    anchors = torch.multinomial(seeds, count, replacement=True, generator=generator)
    slots = anchors[..., None] + torch.arange(1, BLOCK_SIZE)
    length = ids.shape[1]
    inside = slots < length
    slots = slots.clamp(max=length - 1)
    row = torch.arange(batch)[:, None, None]
    inside = (inside & answers[row, slots]).int().cumprod(dim=-1).bool()
    labels = torch.where(inside, ids[row, slots], -1)
    return Rounds(picks, ids.gather(1, anchors), anchors, labels)


def blocks_of(target: Target, seeds: Tensor) -> Tensor:
    """Embeddings [.., S, H] of `[seed, mask, ...]` for seeds [..]."""
    ids = torch.full((*seeds.shape, BLOCK_SIZE), MASK)
    ids[..., 0] = seeds
    return F.embedding(ids, target.embed)


def draft_loss(
    drafter: Drafter,
    target: Target,
    rounds: Rounds,
    captured: Tensor,
    teacher: Tensor,
    recipe: DrafterRecipe,
) -> Tensor:
    """Slot-weighted cross-entropy on the target's tokens and distributions.

    captured [B, T, taps*H]; teacher [B, A, S-1, H], the target's states before each label.
    """
    with torch.autocast("cpu", torch.bfloat16):
        blocks = blocks_of(target, rounds.seeds)
        hidden = drafter(captured, blocks, rounds.anchors)[:, :, 1:]
        log_probs = torch.log_softmax(target.logits(hidden), dim=-1)
        expected = torch.softmax(target.logits(teacher), dim=-1)
    token = -log_probs.gather(-1, rounds.labels.clamp(min=0)[..., None])[..., 0]
    spread = -(expected * log_probs).sum(dim=-1)
    loss = recipe.token_share * token + (1 - recipe.token_share) * spread
    weight = recipe.slot_decay ** torch.arange(BLOCK_SIZE - 1) * (rounds.labels >= 0)
    return (loss * weight).sum() / weight.sum()


@torch.no_grad()
def start_from(drafter: Drafter, target: Target) -> None:
    """Start the draft layers as the target's last ones, reading the deepest tap.

    The context then gives the last draft layer nearly the keys and values that the target's
    last layer computes. What differs in shape keeps its random start.
    """
    last = target.decoder_layers()[-drafter.shape.layers :]
    for layer, source in zip(drafter.draft_layers(), last, strict=True):
        pairs: dict[str, Tensor] = {
            "input_layernorm": source.input_norm.weight,
            "post_attention_layernorm": source.post_norm.weight,
            "q_norm": source.q_norm.weight,
            "k_norm": source.k_norm.weight,
            "o_proj": source.out.weights[0],
            "down_proj": source.down.weights[0],
        }
        pairs.update(zip(("q_proj", "k_proj", "v_proj"), source.qkv.weights, strict=True))
        pairs.update(zip(("gate_proj", "up_proj"), source.gate_up.weights, strict=True))
        for name, weight in pairs.items():
            own = getattr(layer, name).weight
            if own.shape == weight.shape:
                own.copy_(weight)
        drafter.hidden_norm.weight.copy_(source.input_norm.weight)
    drafter.norm.weight.copy_(target.norm.weight)
    size = drafter.shape.hidden
    drafter.fc.weight.mul_(0.3)
    drafter.fc.weight[:, -size:] += torch.eye(size)


def rounds_stream(rows: Rows, recipe: DrafterRecipe, seed: int) -> Iterator[Rounds]:
    """Endless batches of rounds."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield draw(rows, recipe.batch, recipe.anchors, generator)


def _train(
    rank: int,
    target: Target,
    rows: Rows,
    recipe: DrafterRecipe,
    shape: Shape,
    weights: Path,
    start: Path | None,
) -> None:
    torch.manual_seed(1)
    target.requires_grad_(False)
    drafter = Drafter(shape)
    if start is None:
        start_from(drafter, target)
    else:
        drafter.load_state_dict(torch.load(start))
    chosen = optimizers(drafter, recipe.muon_lr, recipe.adam_lr)
    compiled = torch.compile(draft_loss, dynamic=False)
    own = slice(rank, None, recipe.workers)
    rows = Rows(rows.ids[own], rows.answers[own])
    states = read(target, torch.from_numpy(rows.ids.astype(np.int64)))
    stream = rounds_stream(rows, recipe, seed=recipe.seed + rank)
    began = time.monotonic()
    for step in range(recipe.steps):
        set_rate(chosen, schedule(step, recipe.steps, recipe.warmup, recipe.decay))
        rounds = next(stream)
        captured = states.captured[rounds.picks]
        slots = rounds.anchors[..., None] + torch.arange(BLOCK_SIZE - 1)
        teacher = states.hidden[rounds.picks[:, None, None], slots.clamp(max=captured.shape[1] - 1)]
        loss = compiled(drafter, target, rounds, captured, teacher, recipe)
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(drafter)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if rank == 0 and done % 20 == 0:
            seconds = time.monotonic() - began
            print(f"step {done}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
        if rank == 0 and (done % 100 == 0 or done == recipe.steps):
            torch.save(drafter.state_dict(), weights)


def train_drafter(
    target: Target,
    rows: Rows,
    recipe: DrafterRecipe,
    weights: Path,
    shape: Shape = DRAFTER,
    start: Path | None = None,
) -> Drafter:
    """Train a drafter that starts as the target's last layers, or with the weights in `start`.

    The target stays as it is; every worker learns from rows of its own. The weights are also
    written to `weights`.
    """
    run_workers(_train, recipe.workers, target, rows, recipe, shape, weights, start)
    drafter = Drafter(shape)
    drafter.load_state_dict(torch.load(weights))
    return drafter
