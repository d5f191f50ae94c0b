"""lm-eval's log-likelihoods of a served engine against transformers on the same weights.

``python tests/validation/loglikelihood/compare.py --lm-eval VENV/bin/lm_eval``, from the
repository's root; not part of CI. Builds the demo with bf16 activations, serves it, lets
lm-eval's ``local-completions`` score texts.jsonl (what it records: token ids sent, echoed
log-probs summed), and compares every sum with transformers' model of the dequantized
weights in float32. That model in bfloat16 is compared likewise: how far two correct
implementations are apart at this precision. lm-eval has a venv of its own
(docs/serving.md), as its dependencies are many.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from engines import DEMO, ROOT, build_demo
from server import ServerProcess
from trtree.build.checkpoint import Checkpoint
from trtree.runtime.bench.against_dflash import load_dequantized

HERE = Path(__file__).resolve().parent.relative_to(ROOT)
TASKS = ("trtree_continuations", "trtree_whole_texts")
# Nats per scored token between an engine of bf16 activations and float32, or as many as
# transformers in bfloat16 is away at worst: text unlike the demo's makes both differ more.
TOLERANCE = 0.02
# Below this difference of two logits, bf16 may choose either.
NEAR_TIE = 0.1


@dataclass(frozen=True)
class Scored:
    """One text as lm-eval had it scored; ``greedy`` only of continuations."""

    context: list[int]
    continuation: list[int]
    log_likelihood: float
    greedy: bool | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", default="lm_eval", help="the command; default: %(default)s")
    args = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine = build_demo(Path(folder) / "demo", activations="bf16")
        server = ServerProcess(engine)
        try:
            evaluate(args.lm_eval, server.url, Path(folder))
        finally:
            server.close()
        scored = {task: list(read_samples(Path(folder), task)) for task in TASKS}
    exact = load_dequantized(Checkpoint.open(DEMO / "target_nvfp4"))
    expected = {task: [score(exact, text) for text in texts] for task, texts in scored.items()}
    rounded = exact.bfloat16()
    rows = {task: compare(rounded, texts, expected[task]) for task, texts in scored.items()}
    print(json.dumps(rows, indent=2))
    return int(any(row["wrong"] for row in rows.values()))


def evaluate(command: str, url: str, folder: Path) -> None:
    """lm-eval on both tasks; its samples go to ``folder``."""
    model = {
        "base_url": f"{url}/v1/completions",
        "model": "demo",
        "tokenizer": str(DEMO / "target_nvfp4"),
        "tokenizer_backend": "huggingface",
        "max_length": "2048",
        "num_concurrent": "1",
    }
    subprocess.run(
        [
            *(command, "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in model.items())),
            *("--tasks", ",".join(TASKS), "--include_path", str(HERE)),
            *("--batch_size", "8", "--log_samples", "--output_path", str(folder / "results")),
        ],
        env=os.environ | {"HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1"},
        check=True,
    )


def read_samples(folder: Path, task: str) -> Iterator[Scored]:
    """A task's texts in token ids, split as lm-eval splits them, and its figures."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target_nvfp4" / "tokenizer.json"))
    settings = json.loads((DEMO / "target_nvfp4" / "tokenizer_config.json").read_text())
    prefix = [tokenizer.token_to_id(settings["eos_token"])]  # what lm-eval puts before a whole text
    (file,) = folder.glob(f"results/**/samples_{task}_*.jsonl")
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        document, answer = sample["doc"], sample["resps"][0][0]
        text = document["context"] + document["continuation"]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if task == "trtree_whole_texts":
            yield Scored(prefix, ids, _first(answer), None)
            continue
        split = len(tokenizer.encode(document["context"], add_special_tokens=False).ids)
        greedy = {"True": True, "False": False}[str(answer[1])]
        yield Scored(ids[:split], ids[split:], float(answer[0]), greedy)


def _first(answer: Any) -> float:
    return float(answer[0] if isinstance(answer, list) else answer)


def compare(
    rounded: Any, texts: list[Scored], expected: list[tuple[float, bool, float]]
) -> dict[str, Any]:
    """The figures of one task, against ``score``'s of the exact model; ``wrong`` names what is
    not within the tolerance. rounded: the same model in bfloat16."""
    away = [
        abs(score(rounded, text)[0] - exact[0]) / len(text.continuation)
        for text, exact in zip(texts, expected, strict=True)
    ]
    tolerance = max(TOLERANCE, *away)
    errors, wrong, near = [], [], 0
    for index, (text, (log_likelihood, greedy, margin)) in enumerate(
        zip(texts, expected, strict=True)
    ):
        errors.append(abs(text.log_likelihood - log_likelihood) / len(text.continuation))
        if errors[-1] > tolerance:
            wrong.append(f"text {index}: {text.log_likelihood} instead of {log_likelihood}")
        if text.greedy is not None and text.greedy != greedy:
            near += margin <= NEAR_TIE
            if margin > NEAR_TIE:
                wrong.append(f"text {index}: greedy {text.greedy} instead of {greedy}")
    tokens = sum(len(text.continuation) for text in texts)
    return {
        "texts": len(texts),
        "tokens": tokens,
        "log-likelihood per token": sum(exact[0] for exact in expected) / tokens,
        "engine, nats per token": _spread(errors),
        "transformers in bfloat16, nats per token": _spread(away),
        "greedy differs at a near tie": near,
        "wrong": wrong,
    }


def _spread(errors: list[float]) -> dict[str, float]:
    return {"mean": sum(errors) / len(errors), "worst": max(errors)}


def score(model: Any, text: Scored) -> tuple[float, bool, float]:
    """The continuation's log-likelihood, whether it is the greedy choice, and by what margin
    of logits its least certain token is chosen or missed."""
    ids = torch.tensor([text.context + text.continuation])
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits[0, len(text.context) - 1 :].float()
    chosen = logits.gather(-1, ids[0, len(text.context) :, None])[:, 0]
    best, second = logits.topk(2).values.unbind(-1)
    missed = best - chosen
    greedy = bool((missed == 0).all())
    margin = (best - second).min() if greedy else missed.max()
    return float((chosen - logits.logsumexp(-1)).sum()), greedy, float(margin)


if __name__ == "__main__":
    sys.exit(main())
