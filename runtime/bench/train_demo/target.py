"""Training of the target: float first, then with quantized weights and activations (W4A4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import QUESTION_WEIGHT, Document, Rows, pack
from .model import TARGET, Precision, Shape, Target
from .workers import average_gradients, run_workers


@dataclass(frozen=True)
class TargetRecipe:
    """`steps` of `batch` rows for each worker; after `float_steps` they are W4A4.

    The learning rates rise over `warmup` steps and fall over the last `decay` share.
    """

    steps: int = 600
    float_steps: int = 470
    batch: int = 6
    workers: int = 2
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 30
    decay: float = 0.33


def schedule(step: int, steps: int, warmup: int, decay: float) -> float:
    """Linear warm-up, constant, linear decay to 2% over the last `decay` share."""
    left = (steps - step) / (steps * decay)
    return min((step + 1) / warmup, 1.0, max(left, 0.02))


def optimizers(
    module: nn.Module, muon_lr: float, adam_lr: float, table: str = "embed"
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding table and the norms."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (matrices if parameter.ndim == 2 and name != table else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def set_rate(chosen: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to `factor` of where it started."""
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("start", group["lr"]) * factor


@dataclass(frozen=True)
class RowBatch:
    """ids [B, ROW], and the weight [B, ROW] of predicting each of them."""

    ids: Tensor
    weights: Tensor


def row_batch(rows: Rows) -> RowBatch:
    """Rows as tensors; a question's tokens weigh QUESTION_WEIGHT."""
    weights = np.where(rows.answers, 1.0, QUESTION_WEIGHT).astype(np.float32)
    return RowBatch(torch.from_numpy(rows.ids.astype(np.int64)), torch.from_numpy(weights))


def batches(documents: list[Document], batch: int, seed: int) -> Iterator[RowBatch]:
    """Endless batches; every epoch is packed in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        rows = pack([documents[i] for i in rng.permutation(len(documents))])
        for start in range(0, len(rows.ids) - batch + 1, batch):
            part = slice(start, start + batch)
            yield row_batch(Rows(rows.ids[part], rows.answers[part]))


def next_token_loss(target: Target, batch: RowBatch) -> Tensor:
    """Weighted mean negative log-likelihood of the rows."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = target.logits(target(batch.ids[:, :-1])[0])
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def calibrate(target: Target, ids: Tensor) -> None:
    """Set each input's per-tensor scale from the largest magnitude seen on ids [n, T]."""
    for group in target.linears():
        group.observing = True
        group.scale.zero_()
    with torch.compiler.set_stance("force_eager"):
        for part in torch.split(ids, 8):
            target(part)
    for group in target.linears():
        group.observing = False


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean negative log-likelihood, and how often the argmax is right, of answers' tokens."""

    loss: float
    right: float


@torch.no_grad()
def held_out_loss(target: Target, rows: RowBatch) -> HeldOutLoss:
    """On the answers of rows, in float32."""
    loss = right = count = 0.0
    for ids, weights in zip(torch.split(rows.ids, 8), torch.split(rows.weights, 8), strict=True):
        with torch.compiler.set_stance("force_eager"):
            logits = target.logits(target(ids[:, :-1])[0])
        answers = weights[:, 1:] == 1
        truth = ids[:, 1:][answers]
        loss += F.cross_entropy(logits[answers], truth, reduction="sum").item()
        right += (logits[answers].argmax(dim=-1) == truth).sum().item()
        count += len(truth)
    return HeldOutLoss(loss / count, right / count)


def save(checkpoint: Path, step: int, target: Target, chosen: list[torch.optim.Optimizer]) -> None:
    """Write what `resume` needs to go on with `step`."""
    state = {"step": step, "target": target.state_dict(), "opt": [o.state_dict() for o in chosen]}
    beside = checkpoint.with_suffix(".new")
    torch.save(state, beside)
    beside.replace(checkpoint)


def resume(checkpoint: Path, target: Target, chosen: list[torch.optim.Optimizer]) -> int:
    """Load a checkpoint into the target and its optimizers; returns the step to go on with."""
    state = torch.load(checkpoint)
    target.load_state_dict(state["target"])
    for optimizer, saved in zip(chosen, state["opt"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"])


def _train(
    rank: int,
    documents: list[Document],
    held_out: RowBatch,
    recipe: TargetRecipe,
    shape: Shape,
    checkpoint: Path,
) -> None:
    torch.manual_seed(0)
    target = Target(shape)
    chosen = optimizers(target, recipe.muon_lr, recipe.adam_lr)
    for layer in target.layers:
        layer.compile()
    stream = batches(documents, recipe.batch, seed=1 + 100 * rank)
    first = resume(checkpoint, target, chosen) if checkpoint.exists() else 0
    for _ in range(first):
        next(stream)
    if first > recipe.float_steps:
        target.set_precision(Precision.W4A4)
    began = time.monotonic()
    for step in range(first, recipe.steps):
        if step == recipe.float_steps:
            calibrate(target, next(batches(documents, 24, seed=2)).ids)
            target.set_precision(Precision.W4A4)
        set_rate(chosen, schedule(step, recipe.steps, recipe.warmup, recipe.decay))
        loss = next_token_loss(target, next(stream))
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(target)
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if rank == 0 and done % 20 == 0:
            print(f"step {done}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s")
        if rank == 0 and (done % 100 == 0 or done in (recipe.float_steps, recipe.steps)):
            save(checkpoint, done, target, chosen)
            print(f"after {done} steps: {held_out_loss(target, held_out)}", flush=True)


def train_target(
    documents: list[Document],
    held_out: RowBatch,
    recipe: TargetRecipe,
    checkpoint: Path,
    shape: Shape = TARGET,
) -> Target:
    """Train from random weights, watching held-out rows.

    Goes on from `checkpoint` if there is one, and writes it now and then. Returns the float
    weights that W4A4 training ended with.
    """
    run_workers(_train, recipe.workers, documents, held_out, recipe, shape, checkpoint)
    target = Target(shape)
    target.load_state_dict(torch.load(checkpoint)["target"])
    return target
