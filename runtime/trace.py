"""What happened in each round: written by ``serve.py --trace FILE``, read by this command.

``python -m trtree.runtime.trace FILE`` prints a summary and writes a page that shows the
draft tree of every round with its accepted path, acceptance by depth and time per stage.

A trace is JSON lines: a header with the engine's path, then one object per request and
round, ``executor.RoundRecord`` by its names. Prompt chunks are told by their size alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from trtree.build.engine_dir import TOKENIZER, EngineDirError
from trtree.runtime.cli import positive, run_command
from trtree.runtime.executor import RoundRecord
from trtree.runtime.tokenizer import Tokenizer

FORMAT = 1
PAGE = Path(__file__).with_name("trace_page.html")
STAGES = ("draft", "step", "accept")
_COUNTS = ("executor", "round", "request", "committed_length", "rows", "emitted_tokens",
           "tree_budget", "step_rows", "step_requests")  # fmt: skip
_LISTS = ("token_ids", "parents", "accepted")
_SECONDS = ("queue_seconds", "draft_seconds", "step_seconds", "accept_seconds")


class TraceError(ValueError):
    """A trace that cannot be written or read; names the file and the line."""


class TraceWriter:
    """Writes rounds as they come; a line is complete or not there.

    Raises:
        TraceError: the file cannot be written.
    """

    def __init__(self, file: Path, engine: Path) -> None:
        try:
            self._stream: IO[str] = file.open("w", encoding="utf-8")
            self._write([{"trtree_trace": FORMAT, "engine": str(engine.resolve())}])
        except OSError as error:
            raise TraceError(f"trace {file}: {error.strerror}") from None

    def write(self, executor: int, rounds: Sequence[RoundRecord]) -> None:
        """Raises OSError, such as for a full disk."""
        self._write([{"executor": executor, **_line(record)} for record in rounds])

    def close(self) -> None:
        self._stream.close()

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        self._stream.write(
            "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        )
        self._stream.flush()


def _line(record: RoundRecord) -> dict[str, Any]:
    line: dict[str, Any] = {
        "round": record.round,
        "request": record.request_id,
        "prefill": record.prefill,
        "committed_length": record.committed_length,
        "rows": len(record.token_ids),
        "emitted_tokens": record.emitted_tokens,
        "extends_drafter": record.extends_drafter,
        "queue_seconds": record.queue_seconds,
        "draft_seconds": record.draft_seconds,
        "step_seconds": record.step_seconds,
        "accept_seconds": record.accept_seconds,
        "step_rows": record.step_rows,
        "step_requests": record.step_requests,
    }
    if not record.prefill:
        line["tree_budget"] = record.tree_budget
        line |= {name: list(getattr(record, name)) for name in _LISTS}
    return line


def read_trace(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the rounds. A last line that was not finished is left out.

    Raises:
        TraceError: not readable, or not a trace.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{file}: not a trace") from None
    header, *rounds = list(_objects(file, lines[:-1])) or [{}]
    if header.get("trtree_trace") != FORMAT:
        raise TraceError(f"{file}: not a trace of format {FORMAT} (serve.py --trace writes one)")
    for number, line in enumerate(rounds, 2):
        if fault := _fault(line):
            raise TraceError(f"{file}, line {number}: {fault}")
    return header, rounds


def _objects(file: Path, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise TraceError(f"{file}, line {number}: not a JSON object")
        yield line


def _fault(line: dict[str, Any]) -> str | None:
    """What of a round's line the summary or the page could not use."""
    prefill = line.get("prefill")
    if not isinstance(prefill, bool):
        return f"prefill is {prefill!r:.40}"
    for name in _COUNTS:
        if type(line.get(name)) is not int and not (prefill and name == "tree_budget"):
            return f"{name} is {line.get(name)!r:.40}, not a count"
    for name in _SECONDS:
        if not isinstance(line.get(name), int | float):
            return f"{name} is {line.get(name)!r:.40}, not seconds"
    if prefill:
        return None
    for name in _LISTS:
        values = line.get(name)
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            return f"{name} is {values!r:.40}, not a list of integers"
    parents, rows = line["parents"], len(line["token_ids"])
    of_root, of_others = parents[:1], enumerate(parents[1:], 1)
    if len(parents) != rows or of_root != [-1] or any(not 0 <= p < i for i, p in of_others):
        return "parents do not describe a tree of the rows"
    if any(not 0 <= row < rows for row in line["accepted"]):
        return "accepted names a row that is not there"
    return None


@dataclass(frozen=True)
class Depth:
    """How trees fared at one depth: rounds with a node there, and with an accepted one."""

    drafted: int
    accepted: int
    first: int  # of the accepted ones, those that were their parent's first child


@dataclass(frozen=True)
class Summary:
    """Sums over a trace. Seconds of a stage count once a round, however many share it."""

    requests: int
    rounds: int
    prefill_rows: int
    verify_passes: int
    emitted_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_length: float | None
    mean_budget: float | None
    mean_queue_seconds: float
    max_step_requests: int
    seconds: dict[str, float]
    depths: list[Depth]


def summarize(lines: Sequence[dict[str, Any]]) -> Summary:
    verify = [line for line in lines if not line["prefill"]]
    rounds = {(line["executor"], line["round"]): line for line in lines}
    queue = {(line["executor"], line["request"]): line["queue_seconds"] for line in lines}
    decoded = sum(line["emitted_tokens"] for line in verify)
    return Summary(
        requests=len(queue),
        rounds=len(rounds),
        prefill_rows=sum(line["rows"] for line in lines if line["prefill"]),
        verify_passes=len(verify),
        emitted_tokens=sum(line["emitted_tokens"] for line in lines),
        drafted_tokens=sum(line["rows"] - 1 for line in verify),
        accepted_tokens=sum(len(line["accepted"]) - 1 for line in verify),
        acceptance_length=decoded / len(verify) if verify else None,
        mean_budget=sum(line["tree_budget"] for line in verify) / len(verify) if verify else None,
        mean_queue_seconds=sum(queue.values()) / len(queue) if queue else 0.0,
        max_step_requests=max((line["step_requests"] for line in lines), default=0),
        seconds={
            stage: sum(line[f"{stage}_seconds"] for line in rounds.values()) for stage in STAGES
        },
        depths=_depths(verify),
    )


def _depths(verify: Sequence[dict[str, Any]]) -> list[Depth]:
    """From depth 1, the root's children."""
    counts: list[list[int]] = []
    for line in verify:
        parents = line["parents"]
        depths = [0] * len(parents)
        for row in range(1, len(parents)):
            depths[row] = depths[parents[row]] + 1
        deepest = max(depths, default=0)
        counts += [[0, 0, 0] for _ in range(deepest - len(counts))]
        for depth in range(deepest):
            counts[depth][0] += 1
        for row in line["accepted"]:
            if depths[row] > 0:
                count = counts[depths[row] - 1]
                count[1] += 1
                count[2] += parents.index(parents[row], 1) == row
    return [Depth(*count) for count in counts]


def page(
    header: dict[str, Any], lines: Sequence[dict[str, Any]], tokenizer: Tokenizer | None, most: int
) -> str:
    """A page that needs nothing else; it shows the last ``most`` verify passes."""
    verify = [line for line in lines if not line["prefill"]]
    shown = verify[-most:]
    ids = sorted({token for line in shown for token in line["token_ids"]})
    data = {
        "engine": header.get("engine"),
        "summary": asdict(summarize(lines)),
        "verify_passes": len(verify),
        "rounds": shown,
        "texts": {token: tokenizer.token_text(token) for token in ids} if tokenizer else {},
    }
    # In a script element nothing but "</" could end it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("__TRACE__", text)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args), (TraceError, EngineDirError))


def _run(args: argparse.Namespace) -> int:
    header, lines = read_trace(args.file)
    tokenizer = _tokenizer(args.engine, header)
    output = args.html or args.file.with_suffix(".html")
    if output == args.file:
        raise TraceError(f"{output}: the page would replace the trace; pass --html")
    try:
        output.write_text(page(header, lines, tokenizer, args.rounds), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{output}: {error.strerror}") from None
    summary = summarize(lines)
    if args.json:
        print(json.dumps(asdict(summary)))
    else:
        Console().print(_table(summary))
        print(f"page: {output}")
    return 0


def _tokenizer(engine: Path | None, header: dict[str, Any]) -> Tokenizer | None:
    """Of the engine named, or the trace's own if it is still there."""
    if engine is not None:
        return Tokenizer(engine / TOKENIZER)
    own = Path(str(header.get("engine"))) / TOKENIZER
    return Tokenizer(own) if (own / "tokenizer.json").is_file() else None


def _table(summary: Summary) -> Table:
    table = Table(show_header=False)
    for name in ("requests", "rounds", "prefill_rows", "verify_passes", "emitted_tokens"):
        table.add_row(name.replace("_", " "), str(getattr(summary, name)))
    if summary.acceptance_length is not None and summary.mean_budget is not None:
        table.add_row("acceptance length", f"{summary.acceptance_length:.2f}")
        table.add_row("tree budget, mean", f"{summary.mean_budget:.1f}")
        drafted = max(summary.drafted_tokens, 1)
        share = f"{100 * summary.accepted_tokens / drafted:.1f}%"
        table.add_row("drafted, accepted", f"{summary.drafted_tokens}, {share}")
    for number, depth in enumerate(summary.depths, 1):
        table.add_row(
            f"accepted at depth {number}",
            f"{100 * depth.accepted / depth.drafted:.1f}% of {depth.drafted}, "
            f"{depth.accepted - depth.first} not the first choice",
        )
    total = sum(summary.seconds.values()) or 1.0
    for stage, seconds in summary.seconds.items():
        table.add_row(f"time in {stage}", f"{seconds:.3f} s ({100 * seconds / total:.0f}%)")
    table.add_row("queue, mean", f"{1000 * summary.mean_queue_seconds:.1f} ms")
    table.add_row("most requests in a step", str(summary.max_step_requests))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.trace",
        description="Summarize a trace and make a page of its draft trees.",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    parser.add_argument("file", type=Path, help="what serve.py --trace wrote")
    parser.add_argument("--html", type=Path, metavar="OUT", help="the page (default: FILE.html)")
    parser.add_argument(
        "--engine", type=Path, metavar="DIR", help="whose tokenizer (default: the trace's own)"
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=2000,
        metavar="N",
        help="verify passes on the page, the last ones (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
