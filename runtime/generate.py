"""Generate text from the shell: ``python -m trtree.runtime.generate --prompt "..."``.

With --compare, run every prompt of a file in every mode and print one table.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtree.build.engine_dir import EngineDirError
from trtree.runtime.chat_template import ChatTemplate, ChatTemplateError
from trtree.runtime.cli import run_command
from trtree.runtime.executor import FinishReason, Request, SpeculativeConfig
from trtree.runtime.session import Completion, RequestError, Session

BUDGETS = (8, 16, 32, 64)
# The other engine is expected to be slow.
BASELINE_PROMPTS = 2


@dataclass(frozen=True)
class Row:
    """One mode over all prompts. acceptance_length: tokens per verify pass of the target."""

    mode: str
    tree_budget: int | None
    tokens_per_s: float
    target_forwards: int
    acceptance_length: float
    identical: bool  # every output is plain decoding's, token for token


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.prompt is None and args.compare is None:
        parser.error("one of --prompt and --compare is required")
    return run_command(lambda: _run(args), (ChatTemplateError, EngineDirError, RequestError))


def _run(args: argparse.Namespace) -> int:
    session = Session(args.engine, num_threads=args.threads)
    if args.compare is not None:
        return _compare(session, args)
    speculative = session.speculative_config(args.mode, args.tree_budget, args.tree)
    request = _request(session, args.prompt, args, speculative)
    completion = session.stream(request, _discard if args.json else _print_text)
    if args.json:
        text = session.tokenizer.decode(completion.token_ids)
        print(json.dumps({"text": text, **_figures(completion)}))
    else:
        print()
        print(_summary(completion), file=sys.stderr)
    return 0


def _compare(session: Session, args: argparse.Namespace) -> int:
    prompts = read_prompts(args.compare)
    rows = compare(session, prompts, args)
    baseline = _baseline(args, prompts) if args.baseline else None
    if args.json:
        result = {"rows": [asdict(row) for row in rows]}
        print(json.dumps(result | ({"baseline_tokens_per_s": baseline} if baseline else {})))
    else:
        Console().print(_table(rows))
        if baseline:
            plain = rows[0].tokens_per_s
            print(
                f"{args.baseline}: {baseline:.1f} tokens/s in plain decoding of the first "
                f"{min(len(prompts), BASELINE_PROMPTS)} prompts; "
                f"{args.engine} decodes {plain / baseline:.0f} times as fast"
            )
    return 0 if all(row.identical for row in rows) else 1


def _baseline(args: argparse.Namespace, prompts: Sequence[str]) -> float:
    """Tokens/s of plain decoding with another engine, over the first prompts."""
    session = Session(args.baseline)
    plain = session.speculative_config("plain")
    tokens, started = 0, time.perf_counter()
    for prompt in prompts[:BASELINE_PROMPTS]:
        tokens += len(session.complete(_request(session, prompt, args, plain)).token_ids)
    return tokens / (time.perf_counter() - started)


def compare(session: Session, prompts: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Plain, chain and trees over the same prompts, one request at a time."""
    capabilities = session.engine.capabilities()
    modes: list[tuple[str, int | None]] = [("plain", None)]
    if capabilities.block_size > 1:
        fitting = [b for b in BUDGETS if b < capabilities.verify_width]
        modes += [("chain", None), *(("tree", budget) for budget in fitting)]
    expected: list[list[int]] = []
    rows = []
    for mode, budget in modes:
        # Budgets differ from a static tree's own, so trees are rebuilt every round.
        speculative = session.speculative_config(mode, budget or 0, "dynamic")
        started = time.perf_counter()
        completions = [
            session.complete(_request(session, prompt, args, speculative)) for prompt in prompts
        ]
        seconds = time.perf_counter() - started
        outputs = [completion.token_ids for completion in completions]
        expected = expected or outputs
        statistics = [completion.statistics for completion in completions]
        verifies = sum(s.verify_forwards for s in statistics)
        rows.append(
            Row(
                mode,
                budget,
                sum(map(len, outputs)) / seconds,
                sum(s.target_forwards for s in statistics),
                sum(s.decoded_tokens for s in statistics) / max(1, verifies),
                outputs == expected,
            )
        )
    return rows


def read_prompts(file: Path) -> list[str]:
    """One prompt a line, white space kept; empty lines are skipped.

    Raises:
        RequestError: not readable as UTF-8 text, or without a prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: not UTF-8 text ({error.reason})") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise RequestError(f"{file}: no prompt in it")
    return prompts


def _request(
    session: Session, prompt: str, args: argparse.Namespace, speculative: SpeculativeConfig
) -> Request:
    if args.chat:
        template = ChatTemplate(session.engine_dir.tokenizer_path)
        prompt = template.render([{"role": "user", "content": prompt}])
    return Request(
        session.tokenizer.encode(prompt),
        max_tokens=args.max_tokens,
        stop_token_ids=[] if args.ignore_eos else session.stop_token_ids,
        speculative=speculative,
    )


def _figures(completion: Completion) -> dict[str, object]:
    statistics = completion.statistics
    stopped = completion.finish_reason == FinishReason.STOP_TOKEN
    return {
        "tokens": len(completion.token_ids),
        "finish_reason": "stop" if stopped else "length",
        "tokens_per_s": len(completion.token_ids) / completion.seconds,
        "target_forwards": statistics.target_forwards,
        "acceptance_length": statistics.acceptance_length,
        "accepted_tokens": statistics.accepted_tokens,
        "drafted_tokens": statistics.drafted_tokens,
    }


def _summary(completion: Completion) -> str:
    f = _figures(completion)
    return (
        f"{f['tokens']} tokens, {f['tokens_per_s']:.1f} tokens/s, "
        f"{f['target_forwards']} target forwards, "
        f"acceptance length {f['acceptance_length']:.2f}"
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table()
    for column in ("mode", "tree budget", "tokens/s", "target forwards", "acceptance length"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    table.add_column("identical")
    for row in rows:
        table.add_row(
            row.mode,
            "" if row.tree_budget is None else str(row.tree_budget),
            f"{row.tokens_per_s:.1f}",
            str(row.target_forwards),
            f"{row.acceptance_length:.2f}",
            "yes" if row.identical else "NO",
        )
    return table


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _discard(text: str) -> None:
    del text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.generate",
        description="Generate text with an engine, or compare plain, chain and tree decoding.",
        epilog="Exit codes: 0 done, 1 --compare found different tokens, 2 bad input.",
    )
    parser.add_argument(
        "--engine",
        type=Path,
        default=Path("engines/demo"),
        help="engine directory (default: %(default)s)",
    )
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument(
        "--mode",
        choices=("plain", "chain", "tree"),
        default="tree",
        help="how to decode (default: %(default)s)",
    )
    parser.add_argument(
        "--tree-budget", type=int, help="tree nodes besides the root (default: the engine's)"
    )
    parser.add_argument(
        "--tree",
        choices=("dynamic", "static"),
        help="rebuild the tree every round, or use the engine's static one (default: the engine's)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="most tokens to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="prompts are a user's messages: render them with the checkpoint's chat template",
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="threads of the CPU engine (default: the processors this process may use)",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the checkpoint's end-of-text tokens"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="run every prompt of FILE (one a line) in plain, chain and trees "
        f"of budget {', '.join(map(str, BUDGETS))}, and print one table",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="with --compare: an engine to measure plain decoding against, such as the "
        "reference engine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
