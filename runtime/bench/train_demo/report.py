"""The figures as a table, and the model card around it."""

from __future__ import annotations

from typing import Any

from .data import ROW
from .evaluate import COLUMNS, CONTINUATION, REAL_POINTS, SEEDS
from .text import LICENCE
from .words import HELD_OUT_PERCENT

MODES = {
    "greedy": "greedy",
    "sampled": "sampled at temperature 1",
    "real text": "one round after real text",
}


def _cell(value: dict[str, float] | None, digits: int) -> str:
    return "" if value is None else f"{value['mean']:.{digits}f} ± {value['sd']:.{digits}f}"


def table(figures: dict[str, Any]) -> str:
    """Markdown table of tokens per target pass, mean and standard deviation over the seeds."""
    shares = {
        "repeated_8grams": "repeated 8-grams",
        "8grams_in_training": "8-grams in training",
        "right": "right answers",
    }
    lines = [
        f"| target | text | {' | '.join((*COLUMNS, *shares.values()))} |",
        "|---|---|" + "---|" * (len(COLUMNS) + len(shares)),
    ]
    for precision, parts in figures["precisions"].items():
        for mode, title in MODES.items():
            rates = parts[mode]["tokens_per_pass"]
            cells = [_cell(rates[c], 2) for c in COLUMNS]
            cells += [_cell(parts[mode].get(key), 3) for key in shares]
            lines.append(f"| {precision} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


CARD = """# Demo pair: a clerk

A tiny Qwen3 target in NVFP4 (`target_nvfp4/`, {target_parameters:.2f} M parameters) and its
DFlash drafter (`drafter/`, {drafter_parameters:.2f} M parameters, block 8, layers:
{drafter_layers}). It turns what it is given into JSON, tables, invoices, letters, SQL, Python
classes, YAML, sorted lists, sums, routes and short stories. It exists to try and test draft-tree
speculative decoding on any machine, on text that it cannot know by heart.

## Data and licence
Trained from random weights on text that the scripts make themselves
(`runtime/bench/train_demo/text.py`): {training_conversations} conversations of {families} kinds,
{training_tokens:.2f} M tokens, of which the target's training reads {read_tokens:.2f} M. SHA-256:
`{digest}`.
No text, name or list was taken from elsewhere; people, towns and things are invented. Two
conversations in three stand in the chat template's marks, the others plainly, the question on one
line. Text, scripts and weights are {licence}.

## Making
`python -m trtree.runtime.bench.train_demo --out DIR` (needs the `oracle` extra) makes the pair from
nothing: float training, then W4A4-aware training (weights and activations rounded in the forward
pass), export by nvidia-modelopt as `NVFP4`, and a drafter trained on chats whose answers the
exported target wrote itself on this project's CPU engine: first a few, most of them greedy, then
more, most of them sampled. Seeds are fixed; floating-point sums still depend on the machine.

## Figures
Tokens per target pass (accepted drafts + 1), mean ± standard deviation over {seeds} seeds of
{prompts} held-out questions, answered to their end or {continuation} tokens. {held_out_percent}% of
all names, towns, things and codes are kept for the held-out text; phrases and forms are shared with
the training text, so that {real_seen:.0%} of the 8-token windows of its answers occur there. w4a4
is the checkpoint's own algorithm; w4a16 keeps activations in bf16. "One round after real text": the
prompt ends inside a held-out conversation's own answer, at {real_points} places of each, and the
target goes on greedily.

{table}

Repeated 8-grams are windows that occur earlier in the same answer (in the held-out text itself:
{own_repetition:.3f}). A right answer is the held-out one, word for word; where a phrase can be
chosen it need not be.

Target on the held-out answers (w4a4, in training's arithmetic): negative log-likelihood {loss:.3f}
per token, {right:.1%} of tokens right. Against the references in float32: largest difference from
transformers' logits {target_logits:.1e}, of z-lab's drafter {drafter_hidden:.1e}; of z-lab's chain
{published_differ:.0f} of {published_texts} texts differ from plain decoding.

## Samples
Greedy (w4a4):

{samples}

## Limits
It knows the kinds of question above and nothing else: no facts, no open conversation. It copies
well; sums, sorting, and which field belongs to what often go wrong. Trained on {row} tokens of
context (positions are configured up to 2,048). Its text is regular, so acceptance is higher than a
general model's on open text.
"""


def card(figures: dict[str, Any]) -> str:
    """The model card."""
    return CARD.format(
        licence=LICENCE,
        seeds=len(SEEDS),
        continuation=CONTINUATION,
        real_points=REAL_POINTS,
        held_out_percent=HELD_OUT_PERCENT,
        row=ROW,
        table=table(figures),
        samples="\n\n".join(
            f"**{question}**\n\n~~~\n{answer.strip()}\n~~~"
            for question, answer in figures["samples"].items()
        ),
        **figures["data"],
        **figures["held_out"],
        **figures["checks"],
    )
