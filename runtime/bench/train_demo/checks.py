"""Checks of the exported pair against transformers and z-lab's published package."""

from __future__ import annotations

from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from torch import Tensor

from trtree.build.checkpoint import Checkpoint
from trtree.runtime.bench.against_dflash import load_dequantized

from .data import END, IM_END
from .drafter import blocks_of
from .export import load_drafter, load_target
from .model import BLOCK_SIZE, TAPS, Precision, Shape

TOLERANCE = 1e-4


def largest(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest magnitude (at least 1)."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


@torch.no_grad()
def check_pair(
    target_folder: Path, drafter_folder: Path, shapes: tuple[Shape, Shape], prompts: list[list[int]]
) -> dict[str, float]:
    """Compare both networks with their references in float32, on dequantized weights.

    shapes: the target's and the drafter's. Returns the largest differences, and in how many
    texts z-lab's greedy chain differs from plain decoding.

    Raises:
        ValueError: a difference above TOLERANCE.
    """
    target = load_target(target_folder, shapes[0], Precision.FLOAT)
    drafter = load_drafter(drafter_folder, shapes[1])
    reference = load_dequantized(Checkpoint.open(target_folder))
    published = DFlashDraftModel.from_pretrained(drafter_folder, dtype=torch.float32).eval()
    found = {"target_logits": 0.0, "drafter_hidden": 0.0}
    differ = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        states, captured = target(ids, TAPS)
        logits = target.logits(states)
        differences = {"target_logits": largest(logits, reference(ids).logits)}
        context = len(prompt) - 1
        block = blocks_of(target, ids[:, context])
        theirs = published(
            position_ids=torch.arange(context + BLOCK_SIZE)[None],
            noise_embedding=block,
            target_hidden=captured[:, :context],
        )
        ours = drafter(captured[:, :context], block[:, None], torch.tensor([[context]]))[:, 0]
        differences["drafter_hidden"] = largest(ours, theirs)
        for name, value in differences.items():
            if not value <= TOLERANCE:  # NaN fails too
                raise ValueError(f"{name} differs by {value}, more than {TOLERANCE}")
            found[name] = max(found[name], value)
        plain = reference.generate(
            ids, max_new_tokens=64, do_sample=False, eos_token_id=[IM_END, END], pad_token_id=END
        )
        drafted = dflash_generate(published, reference, ids, 64, [IM_END, END], 0.0)
        differ += not torch.equal(drafted, plain)
    return {**found, "published_differ": differ, "published_texts": len(prompts)}
