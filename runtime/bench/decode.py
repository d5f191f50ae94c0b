"""Decoding on a step that is bound by memory: plain, chain and trees.

The pair of a configuration (the demo's) is embedded, bit for bit, in a network with a
larger model's GEMM shapes, so that a step costs what it costs there while acceptance is
a trained pair's. Before anything is timed, the widened engine's tokens are checked to be
the pair's own. Then: time of a target step against its rows, and tokens/s and acceptance
length of each mode. Rounds of all modes are interleaved, so that a busy machine slows
them alike; quote ratios from one run. A request's clock starts with its first token.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtree import _core
from trtree.build.bench.widen import SHAPES
from trtree.build.bench.widened import build_widened
from trtree.build.builder import describe, write
from trtree.build.options import BuildOptions, OptionError, read_options
from trtree.runtime.chat_template import ChatTemplate
from trtree.runtime.cli import positive
from trtree.runtime.executor import Request, RequestStatistics
from trtree.runtime.generate import read_prompts
from trtree.runtime.session import Session

ROWS = (1, 2, 3, 5, 9, 17, 33, 65)
BUDGETS = (2, 4, 6, 8, 12, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--widen", choices=tuple(SHAPES), default="qwen3-0.6b", help="default: %(default)s"
    )
    parser.add_argument(
        "--config", type=Path, default=Path("configs/demo.yaml"), help="default: %(default)s"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path("configs/demo/prompts.txt"),
        help="one a line; default: %(default)s",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompts into the chat template"
    )
    parser.add_argument("--max-tokens", type=positive, default=64, help="default: %(default)s")
    parser.add_argument(
        "--repeats", type=positive, default=15, help="of a step; default: %(default)s"
    )
    parser.add_argument("--activations", choices=("nvfp4", "bf16"), help="default: the pair's")
    parser.add_argument("--kv-cache", choices=("auto", "fp8", "float"), help="default: auto")
    parser.add_argument(
        "--context",
        type=positive,
        default=200,
        metavar="N",
        help="tokens before a measured step; default: %(default)s",
    )
    parser.add_argument(
        "--quantize-drafter", choices=("nvfp4",), help="W4A16 drafter (default: as it is stored)"
    )
    parser.add_argument(
        "--block-size", type=positive, metavar="B", help="default: the drafter's own"
    )
    parser.add_argument(
        "--against",
        choices=("dflash",),
        help="instead, compare the chain on the pair itself with z-lab's published package",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG or SVG")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Builds, checks, measures."""
    options = read_options(args.config).with_overrides(
        {
            name: getattr(args, name)
            for name in ("activations", "kv_cache", "quantize_drafter", "block_size")
        }
    )
    options = options.with_changes({"backend": "cpu"})
    prompts = read_prompts(args.prompts)
    if args.against:
        # Imported here: it needs packages that the rest does not.
        from trtree.runtime.bench import against_dflash

        return against_dflash.compare(options, prompts, args.max_tokens)
    if args.plot and find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib, which is not installed")
    with tempfile.TemporaryDirectory() as folder:
        small, wide = _build(options, args.widen, Path(folder))
        if args.chat:
            template = ChatTemplate(wide.engine_dir.tokenizer_path)
            prompts = [template.render([{"role": "user", "content": p}]) for p in prompts]
        # Steps write to pages of the executor's choice too, so they come before it caches any.
        step = _measure_steps(wide.engine, args.context, args.repeats)
        _check_tokens(small, wide, prompts, args.max_tokens)
        result = {
            "widen": args.widen,
            "quantize_drafter": args.quantize_drafter,
            "block_size": wide.engine.capabilities().block_size,
            "kv_cache": wide.engine_dir.manifest["build_config"]["kv_cache"]["stored_as"],
            "context": args.context,
            "activations": wide.engine.capabilities().activations,
            "chat": args.chat,
            "max_tokens": args.max_tokens,
            "threads": len(os.sched_getaffinity(0)),
            "step": step,
            "decode": _measure_modes(wide, prompts, args.max_tokens),
        }
    if args.plot:
        _plot(result, args.plot)
    return result


def _build(options: BuildOptions, shape: str, folder: Path) -> tuple[Session, Session]:
    small = write(describe(options.with_changes({"output": folder / "small"})))
    wide = build_widened(options.with_changes({"output": folder / "wide"}), SHAPES[shape])
    return Session(small), Session(wide)


def _check_tokens(small: Session, wide: Session, prompts: Sequence[str], max_tokens: int) -> None:
    """The widened engine says what the pair says, plainly and with a tree.

    Raises:
        RuntimeError: it does not, so no figure would mean anything.
    """
    for mode in ("plain", "tree"):
        for prompt in prompts[:2]:
            tokens = [
                session.complete(_request(session, prompt, mode, 8, max_tokens)).token_ids
                for session in (small, wide)
            ]
            if tokens[0] != tokens[1]:
                raise RuntimeError(f"the widened engine's {mode} tokens are not the pair's")


def _measure_steps(engine: _core.Engine, context: int, repeats: int) -> list[dict[str, float]]:
    """Milliseconds of a target step by its number of rows, medians of interleaved repeats."""
    rng = random.Random(0)
    vocab = engine.capabilities().vocab_size
    pages = list(range((context + max(ROWS)) // engine.capabilities().page_size + 1))
    prompt = [rng.randrange(vocab) for _ in range(max(context, *ROWS))]
    chunk = engine.capabilities().max_num_rows
    for start in range(0, context, chunk):
        tokens = prompt[start : min(start + chunk, context)]
        at = _core.Sequence(1, 0, start, pages)
        _step(engine, at, tokens)
        engine.commit([_core.Commit(at, list(range(len(tokens))))])
    at = _core.Sequence(1, 0, context, pages)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for rows in ROWS:
            times[rows].append(_step(engine, at, prompt[:rows]))
    return [
        {"rows": rows, "ms": 1e3 * sorted(found)[len(found) // 2], "best_ms": 1e3 * min(found)}
        for rows, found in times.items()
    ]


def _step(engine: _core.Engine, at: _core.Sequence, tokens: list[int]) -> float:
    rows = list(range(len(tokens)))
    batch = _core.RowBatch([_core.SegmentRequest(at, tokens, [r - 1 for r in rows], rows)])
    started = time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - started


@dataclass(frozen=True)
class _Decoded:
    """One request: its tokens, and the seconds that all but the first of them took.

    The first come with the prompt, whose cost depends on what is cached.
    """

    token_ids: list[int]
    later: int
    seconds: float
    statistics: RequestStatistics


def _decode(session: Session, request: Request) -> _Decoded:
    session.enqueue(request)
    responses = session.responses()
    first = next(responses)
    started = time.perf_counter()
    tokens, last = list(first.token_ids), first
    for last in responses:
        tokens += last.token_ids
    seconds = time.perf_counter() - started
    return _Decoded(tokens, len(tokens) - len(first.token_ids), seconds, last.statistics)


def _measure_modes(
    session: Session, prompts: Sequence[str], max_tokens: int
) -> list[dict[str, Any]]:
    """Tokens/s and acceptance length by mode, every prompt in every mode in turn."""
    modes: list[tuple[str, int | None]] = [("plain", None), ("chain", None)]
    modes += [("tree", budget) for budget in BUDGETS]
    seconds = dict.fromkeys(modes, 0.0)
    tokens = dict.fromkeys(modes, 0)
    verifies = dict.fromkeys(modes, 0)
    decoded = dict.fromkeys(modes, 0)
    for prompt in prompts:
        expected = None
        for mode, budget in modes:
            done = _decode(session, _request(session, prompt, mode, budget, max_tokens))
            expected = expected or done.token_ids
            if done.token_ids != expected:
                raise RuntimeError(f"{mode} {budget}: tokens differ from plain decoding's")
            seconds[mode, budget] += done.seconds
            tokens[mode, budget] += done.later
            verifies[mode, budget] += done.statistics.verify_forwards
            decoded[mode, budget] += done.statistics.decoded_tokens
    plain = tokens["plain", None] / seconds["plain", None]
    chain = tokens["chain", None] / seconds["chain", None]
    return [
        {
            "mode": mode,
            "tree_budget": budget,
            "tokens_per_s": tokens[mode, budget] / seconds[mode, budget],
            "acceptance_length": decoded[mode, budget] / max(1, verifies[mode, budget]),
            "over_plain": tokens[mode, budget] / seconds[mode, budget] / plain,
            "over_chain": tokens[mode, budget] / seconds[mode, budget] / chain,
        }
        for mode, budget in modes
    ]


def _request(
    session: Session, prompt: str, mode: str, budget: int | None, max_tokens: int
) -> Request:
    return Request(
        session.tokenizer.encode(prompt),
        max_tokens=max_tokens,
        stop_token_ids=session.stop_token_ids,
        speculative=session.speculative_config(mode, budget or 0, "dynamic"),
    )


def _plot(result: dict[str, Any], file: Path) -> None:
    """Step time against rows, and tokens/s by mode, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (steps, speeds) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    steps.plot([s["rows"] for s in result["step"]], [s["ms"] for s in result["step"]], "o-")
    steps.set(xlabel="rows of a step", ylabel="ms", title=f"target step, {result['widen']} shapes")
    steps.set_ylim(bottom=0)
    labels = [
        row["mode"] + (f" {row['tree_budget']}" if row["tree_budget"] else "")
        for row in result["decode"]
    ]
    speeds.bar(labels, [row["tokens_per_s"] for row in result["decode"]])
    for index, row in enumerate(result["decode"]):
        speeds.annotate(
            f"{row['acceptance_length']:.2f}",
            (index, row["tokens_per_s"]),
            ha="center",
            va="bottom",
        )
    speeds.set(ylabel="tokens/s", title="decoding (acceptance length above)")
    speeds.tick_params(axis="x", rotation=60)
    figure.tight_layout()
    figure.savefig(file)
