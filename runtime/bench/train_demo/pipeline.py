"""The stages that make the pair, each from what the ones before it left in two folders."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from . import data, report
from .checks import check_pair
from .drafter import DrafterRecipe, train_drafter
from .evaluate import answers, evaluate
from .export import export_drafter, export_target, load_target
from .model import DRAFTER, TARGET, Drafter, Precision, Shape, Target
from .rollouts import make_rollouts
from .target import TargetRecipe, batches, held_out_loss, row_batch, train_target
from .text import FAMILIES, Conversation
from .trace import Tracer

REFINEMENT = DrafterRecipe(
    steps=600, batch=8, workers=1, muon_lr=0.01, adam_lr=1.5e-3, decay=1.0, seed=20
)
ROLLOUTS, MORE_ROLLOUTS = "rollouts.npz", "more_rollouts.npz"
SAMPLES = ("order", "story", "sort", "letter", "class", "route")


@dataclass(frozen=True)
class Plan:
    """How much of everything; the defaults made the committed pair.

    training, held_out: conversations; `digest` is their SHA-256. tokenizer_texts: how many of
    the first the tokenizer learns from. rollouts: chats, of which `sampled_share` are sampled;
    more_rollouts: as many again that only the drafter's refinement reads, with the first ones.
    prompts: held-out questions of each seed's figures.
    """

    training: int = 48000
    held_out: int = 600
    digest: str = "54a1012aecea6a0ce956d98309465fb33b5370420c43596cb2aa107e7dc9602e"
    tokenizer_texts: int = 12000
    target: Shape = TARGET
    target_recipe: TargetRecipe = field(default_factory=TargetRecipe)
    rollouts: int = 800
    sampled_share: float = 0.3
    drafter: Shape = DRAFTER
    drafter_recipe: DrafterRecipe = field(default_factory=DrafterRecipe)
    more_rollouts: int = 2400
    more_sampled_share: float = 0.6
    refinement: DrafterRecipe = REFINEMENT
    prompts: int = 70
    checked: int = 8


@dataclass(frozen=True)
class Corpus:
    """The encoded text."""

    tokenizer: Tokenizer
    training: list[data.Document]
    held_out: list[data.Document]
    held_out_text: list[Conversation]


@dataclass(frozen=True)
class Folders:
    """Where intermediate files and the pair go."""

    work: Path
    out: Path

    @property
    def target(self) -> Path:
        return self.out / "target_nvfp4"

    @property
    def drafter(self) -> Path:
        return self.out / "drafter"


def corpus(plan: Plan) -> Corpus:
    """Make, check and encode the snapshot.

    Raises:
        ValueError: the text is not the one that the committed pair learned.
    """
    found = data.snapshot(plan.training, plan.held_out)
    if found.digest() != plan.digest:
        raise ValueError(f"the text's SHA-256 is {found.digest()}, expected {plan.digest}")
    tokenizer = data.train_tokenizer(found.training[: plan.tokenizer_texts])
    return Corpus(
        tokenizer,
        data.encode(tokenizer, found.training),
        data.encode(tokenizer, found.held_out),
        found.held_out,
    )


def held_out_rows(text: Corpus) -> data.Rows:
    """Some packed rows of held-out text."""
    rows = data.pack(text.held_out)
    return data.Rows(rows.ids[:48], rows.answers[:48])


def make_target(plan: Plan, text: Corpus, folders: Folders) -> None:
    rows = row_batch(held_out_rows(text))
    checkpoint = folders.work / "checkpoint.pt"
    train_target(text.training, rows, plan.target_recipe, checkpoint, plan.target)


def make_export(plan: Plan, text: Corpus, folders: Folders) -> None:
    target = Target(plan.target)
    target.load_state_dict(torch.load(folders.work / "checkpoint.pt")["target"])
    calibration = next(batches(text.training, 32, seed=3)).ids
    export_target(target, text.tokenizer, calibration, folders.target)


def write_rollouts(
    text: Corpus, folders: Folders, file: str, count: int, sampled_share: float, seed: int
) -> None:
    newline = text.tokenizer.token_to_id("Ċ")
    with tempfile.TemporaryDirectory() as engine:
        tracer = Tracer(folders.target, None, Path(engine) / "engine")
        rows = make_rollouts(tracer, text.training, newline, count, sampled_share, seed)
    np.savez(folders.work / file, ids=rows.ids, answers=rows.answers)


def read_rollouts(folders: Folders, *files: str) -> data.Rows:
    found = [np.load(folders.work / file) for file in files]
    return data.Rows(*(np.concatenate([f[part] for f in found]) for part in ("ids", "answers")))


def make_all_rollouts(plan: Plan, text: Corpus, folders: Folders) -> None:
    write_rollouts(text, folders, ROLLOUTS, plan.rollouts, plan.sampled_share, seed=11)


def make_more_rollouts(plan: Plan, text: Corpus, folders: Folders) -> None:
    count, share = plan.more_rollouts, plan.more_sampled_share
    write_rollouts(text, folders, MORE_ROLLOUTS, count, share, seed=12)


def make_drafter(plan: Plan, _: Corpus, folders: Folders) -> None:
    target = load_target(folders.target, plan.target, Precision.W4A4)
    rows = read_rollouts(folders, ROLLOUTS)
    weights = folders.work / "drafter.pt"
    drafter = train_drafter(target, rows, plan.drafter_recipe, weights, plan.drafter)
    export_drafter(drafter, plan.target, folders.drafter)


def refine_drafter(plan: Plan, _: Corpus, folders: Folders) -> None:
    target = load_target(folders.target, plan.target, Precision.W4A4)
    rows = read_rollouts(folders, ROLLOUTS, MORE_ROLLOUTS)
    start, weights = folders.work / "drafter.pt", folders.work / "refined.pt"
    drafter = train_drafter(target, rows, plan.refinement, weights, plan.drafter, start)
    export_drafter(drafter, plan.target, folders.drafter)


def make_figures(plan: Plan, text: Corpus, folders: Folders) -> None:
    windows = data.training_windows(text.training)
    figures: dict[str, Any] = {"precisions": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, activations in (("w4a4", "nvfp4"), ("w4a16", "bf16")):
            engine = Path(folder) / name
            tracer = Tracer(folders.target, folders.drafter, engine, activations)
            if name == "w4a4":
                figures["samples"] = answers(tracer, text.tokenizer, sample_questions(text))
            figures["precisions"][name] = evaluate(tracer, text.held_out, windows, plan.prompts)
    target = load_target(folders.target, plan.target, Precision.W4A4)
    figures["held_out"] = vars(held_out_loss(target, row_batch(held_out_rows(text))))
    figures["data"] = describe_text(plan, text, windows)
    prompts = [d.ids[: d.answer] for d in text.held_out[: plan.checked]]
    figures["checks"] = check_pair(
        folders.target, folders.drafter, (plan.target, plan.drafter), prompts
    )
    (folders.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folders.out / "README.md").write_text(report.card(figures))
    print(report.table(figures))
    print(json.dumps({k: figures[k] for k in ("held_out", "data", "checks")}, indent=1))


def sample_questions(text: Corpus) -> list[str]:
    """The first held-out question of each of SAMPLES."""
    first = {c.family: c.question for c in reversed(text.held_out_text)}
    return [first[family] for family in SAMPLES]


def describe_text(
    plan: Plan, text: Corpus, windows: np.ndarray[Any, np.dtype[np.uint64]]
) -> dict[str, Any]:
    """What the model card says of the text and the networks' sizes."""
    recipe = plan.target_recipe
    real = [d.ids[d.answer :] for d in text.held_out]
    keys = [data.window_keys(ids) for ids in real]
    seen = np.concatenate([data.seen_in_training(ids, windows) for ids in real])
    return {
        "digest": plan.digest,
        "prompts": plan.prompts,
        "families": len(FAMILIES),
        "training_conversations": len(text.training),
        "training_tokens": sum(len(d.ids) for d in text.training) / 1e6,
        "read_tokens": recipe.steps * recipe.batch * recipe.workers * data.ROW / 1e6,
        "real_seen": float(seen.mean()),
        "own_repetition": 1 - sum(len(np.unique(k)) for k in keys) / sum(map(len, keys)),
        "target_parameters": sum(p.numel() for p in Target(plan.target).parameters()) / 1e6,
        "drafter_parameters": sum(p.numel() for p in Drafter(plan.drafter).parameters()) / 1e6,
        "drafter_layers": plan.drafter.layers,
    }


STAGES = {
    "target": make_target,
    "export": make_export,
    "rollouts": make_all_rollouts,
    "drafter": make_drafter,
    "more_rollouts": make_more_rollouts,
    "refine": refine_drafter,
    "evaluate": make_figures,
}


def run(plan: Plan, folders: Folders, stages: Collection[str]) -> None:
    """Run stages in their order."""
    for folder in (folders.work, folders.out):
        folder.mkdir(parents=True, exist_ok=True)
    text = corpus(plan)
    for name, stage in STAGES.items():
        if name in stages:
            print(f"== {name}", flush=True)
            stage(plan, text, folders)
