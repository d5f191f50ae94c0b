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
from trtree.runtime.cli import INT32_MAX, integer, run_command, threads
from trtree.runtime.executor import FinishReason, Request, RequestStatistics, SpeculativeConfig
from trtree.runtime.sampling_flags import add_sampling_flags, sampling_config
from trtree.runtime.session import Completion, RequestError, Session

BUDGETS = (8, 16, 32, 64)
# The other engine is expected to be slow.
BASELINE_PROMPTS = 2
# What the engine takes; the engine itself says what makes sense.
_int32 = integer(-INT32_MAX - 1)


@dataclass(frozen=True)
class Row:
    """One mode over all prompts. acceptance_length: tokens per verify pass of the target."""

    mode: str
    tree_budget: int | None
    tokens_per_s: float
    target_forwards: int
    acceptance_length: float | None  # None: no verify pass
    identical: bool  # every output is plain decoding's, token for token


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if conflict := _conflict(args):
        parser.error(conflict)
    if note := _unused(args):
        print(note, file=sys.stderr)
    return run_command(lambda: _run(args), (ChatTemplateError, EngineDirError, RequestError))


def _conflict(args: argparse.Namespace) -> str | None:
    """What is wrong with the options taken together."""
    if args.prompt is None and args.compare is None:
        return "one of --prompt and --compare is required"
    if args.compare is None and args.baseline is not None:
        return "--baseline needs --compare"
    if args.compare is not None and args.prompt is not None:
        return "--compare has its own prompts; leave out --prompt"
    return None


def _unused(args: argparse.Namespace) -> str | None:
    """Options given that have no effect with the others."""
    names = ["tree", "tree_budget"]
    if args.compare is not None:
        names, why = ["mode", *names], "with --compare, which runs every mode"
    elif args.mode in ("chain", "plain"):
        why = f"in mode {args.mode}"
    else:
        return None
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) is not None]
    return f"note: {', '.join(given)} has no effect {why}" if given else None


def _run(args: argparse.Namespace) -> int:
    session = _open(args.engine, args.threads)
    if args.compare is not None:
        return _compare(session, args)
    mode = args.mode or _default_mode(session, args)
    speculative = session.speculative_config(
        mode, args.tree_budget, args.tree, policy=args.policy, chain_seed=args.chain_seed
    )
    request = _request(session, args.prompt, args, speculative)
    completion = session.stream(request, _discard if args.json else _print_text)
    if args.json:
        text = session.tokenizer.decode(completion.token_ids)
        print(json.dumps({"text": text, **_figures(completion)}))
    else:
        print()
        print(_summary(completion), file=sys.stderr)
    return 0


def _open(engine: Path, num_threads: int | None = None) -> Session:
    """Raises EngineDirError also for what only loading tells, such as a KV pool too large."""
    try:
        return Session(engine, num_threads=num_threads)
    except EngineDirError:
        raise
    except (RuntimeError, MemoryError, ValueError) as error:
        reason = str(error) or "out of memory"
        raise EngineDirError(f"{engine}: the engine cannot be loaded: {reason}") from None


def _default_mode(session: Session, args: argparse.Namespace) -> str:
    """Trees if the engine has a drafter, or if they are asked for (and then refused)."""
    wants_tree = args.tree is not None or args.tree_budget is not None
    return "tree" if session.engine.capabilities().block_size > 1 or wants_tree else "plain"


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
    session = _open(args.baseline)
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
                sum(s.decoded_tokens for s in statistics) / verifies if verifies else None,
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
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestError(f"prompt {prompt[:40]!r} is not valid UTF-8 text") from None
    if args.chat:
        template = ChatTemplate(session.engine_dir.tokenizer_path)
        prompt = template.render([{"role": "user", "content": prompt}])
    return Request(
        session.tokenizer.encode(prompt),
        max_tokens=args.max_tokens,
        stop_token_ids=[] if args.ignore_eos else session.stop_token_ids,
        sampling=sampling_config(args),
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
        "acceptance_length": _acceptance_length(statistics),
        "accepted_tokens": statistics.accepted_tokens,
        "drafted_tokens": statistics.drafted_tokens,
    }


def _summary(completion: Completion) -> str:
    statistics = completion.statistics
    tokens = len(completion.token_ids)
    return (
        f"{tokens} tokens, {tokens / completion.seconds:.1f} tokens/s, "
        f"{statistics.target_forwards} target forwards, "
        f"acceptance length {_length(_acceptance_length(statistics))}"
    )


def _acceptance_length(statistics: RequestStatistics) -> float | None:
    return statistics.acceptance_length if statistics.verify_forwards else None


def _length(acceptance_length: float | None) -> str:
    """Two digits; "-" where no pass verified anything."""
    return "-" if acceptance_length is None else f"{acceptance_length:.2f}"


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
            _length(row.acceptance_length),
            "yes" if row.identical else "NO",
        )
    return table


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def _discard(text: str) -> None:
    del text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.generate",
        description="Generate text with an engine, or compare plain, chain and tree decoding.",
        epilog="Exit codes: 0 done, 1 --compare found different tokens, 2 bad input, "
        "130 interrupted, 143 terminated.",
    )
    parser.add_argument(
        "--engine",
        type=Path,
        default=Path("engines/demo"),
        help="engine directory (default: %(default)s)",
    )
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument(
        "--max-tokens",
        type=_int32,
        default=128,
        metavar="N",
        help="most tokens to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="prompts are a user's messages: render them with the checkpoint's chat template",
    )
    parser.add_argument(
        "--threads",
        type=threads,
        metavar="N",
        help="threads of the CPU engine (default: the processors this process may use)",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the checkpoint's end-of-text tokens"
    )
    _add_decoding_flags(parser)
    _add_comparison_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--mode",
        choices=("plain", "chain", "tree"),
        help="how to decode (default: tree, plain if the engine has no drafter)",
    )
    group.add_argument(
        "--tree-budget",
        type=_int32,
        metavar="N",
        help="tree nodes besides the root (default: the engine's)",
    )
    group.add_argument(
        "--tree",
        choices=("dynamic", "static"),
        help="rebuild the tree every round, or use the engine's static one (default: the engine's)",
    )
    group.add_argument(
        "--policy",
        choices=("fixed", "load", "adaptive"),
        default="fixed",
        help="how many of the budget's nodes a round has: all, what the load leaves room for, "
        "or what is worth its cost (see trtree.runtime.calibrate) (default: %(default)s)",
    )
    group.add_argument(
        "--chain-seed",
        action="store_true",
        help="begin each tree with the drafter's first candidates of every depth",
    )


def _add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="run every prompt of FILE (one a line) in plain, chain and trees "
        f"of budget {', '.join(map(str, BUDGETS))}, and print one table",
    )
    group.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="with --compare: an engine to measure plain decoding against, such as the "
        "reference engine",
    )


if __name__ == "__main__":
    sys.exit(main())
