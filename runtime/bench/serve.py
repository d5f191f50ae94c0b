"""The server under load: plain, chain, tree and adaptive trees at 1 to 128 clients.

Starts the server in a process of its own (or measures one that runs, --url). Each client
sends its next request when it has the last answer, streamed. Modes take turns at each
number of clients, forwards and backwards, so that a busy machine slows them alike; texts of
all modes must be equal, or there is no result. Per run: output tokens per second of all
clients, the same over the first mode's (the median of the turns), and percentiles of the
time to the first token, of the time per output token of each request, and of the gaps
between a stream's parts (a part holds an accepted path). The load comes from one more
process on the same machine: quote ratios from one run. What is measured is told on stderr as
it comes, so that a run that is ended early was not for nothing.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trtree.build.bench.widen import SHAPES
from trtree.build.bench.widened import build_widened
from trtree.build.options import read_options
from trtree.runtime.cli import positive
from trtree.runtime.generate import read_prompts
from trtree.runtime.session import RequestError

MODES: dict[str, dict[str, Any]] = {
    "plain": {"mode": "plain"},
    "chain": {"mode": "chain"},
    "tree": {"mode": "tree"},
    "adaptive": {"mode": "tree", "policy": "adaptive"},
}
CLIENTS = (1, 8, 32, 128)
PERCENTILES = (50, 90, 99)
REQUEST_SECONDS = 600
# What a server answers that cannot do what was asked.
REFUSED = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--engine", type=Path, default=Path("engines/demo"), help="default: %(default)s"
    )
    parser.add_argument(
        "--widen",
        choices=tuple(SHAPES),
        help="instead, the demo pair embedded in these shapes, as in bench decode",
    )
    parser.add_argument("--url", help="instead, a server that runs, such as http://host:8000")
    parser.add_argument(
        "--clients",
        type=positive,
        nargs="+",
        default=CLIENTS,
        metavar="N",
        help=f"default: {' '.join(map(str, CLIENTS))}",
    )
    parser.add_argument(
        "--modes", choices=tuple(MODES), nargs="+", default=tuple(MODES), help="default: all"
    )
    parser.add_argument(
        "--tree-budgets",
        type=positive,
        nargs="+",
        metavar="N",
        help="of mode tree, each a mode of its own, and the largest of adaptive trees; "
        "default: the engine's",
    )
    parser.add_argument("--max-tokens", type=positive, default=64, help="default: %(default)s")
    parser.add_argument(
        "--requests",
        type=positive,
        default=2,
        metavar="N",
        help="each client sends at a time; default: %(default)s",
    )
    parser.add_argument(
        "--turns", type=positive, default=3, metavar="N", help="of each mode; default: %(default)s"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path("configs/demo/prompts.txt"),
        help="one a line; default: %(default)s",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the server if it has to, checks, measures.

    Raises:
        RequestError: no server there, or it failed on a request.
        RuntimeError: modes gave different texts.
    """
    prompts = read_prompts(args.prompts)
    with _server(args) as url:
        rows = asyncio.run(_measure(url, prompts, args))
    return {
        "engine": args.url or args.widen or str(args.engine),
        "max_tokens": args.max_tokens,
        "rows": rows,
    }


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """Its URL."""
    if args.url:
        yield args.url
        return
    with tempfile.TemporaryDirectory() as folder:
        engine = args.engine
        if args.widen:
            options = read_options(Path("configs/demo.yaml"))
            wide = options.with_changes({"output": Path(folder) / "wide", "backend": "cpu"})
            engine = build_widened(wide, SHAPES[args.widen])
            subprocess.run(
                [sys.executable, "-m", "trtree.runtime.calibrate", "--engine", str(engine)],
                stdout=subprocess.DEVNULL,
                check=True,
            )
        with serving(engine) as (url, _):
            yield url


@contextmanager
def serving(engine: Path) -> Iterator[tuple[str, int]]:
    """A server of this engine on a free port; its URL and its process's id."""
    command = [sys.executable, "-m", "trtree.runtime.serve", "--engine", str(engine)]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:  # it said why on stderr
            raise RequestError(f"{engine}: the server did not start")
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait()


@dataclass
class _Run:
    """What one mode's turns at one number of clients gave. Seconds."""

    requests: int = 0
    seconds: float = 0.0
    tokens: int = 0
    verify_forwards: int = 0
    decoded_tokens: float = 0.0
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens per second, by turn

    def over(self, first: "_Run") -> float:
        """The median of this mode's speed over another's, turn by turn."""
        return statistics.median(a / b for a, b in zip(self.speeds, first.speeds, strict=True))

    def row(self, mode: str, clients: int) -> dict[str, Any]:
        return {
            "mode": mode,
            "clients": clients,
            "requests": self.requests,
            "tokens_per_s": self.tokens / self.seconds,
            "acceptance_length": self.decoded_tokens / max(self.verify_forwards, 1),
            "time_to_first_token_ms": percentiles(self.first),
            "time_per_output_token_ms": percentiles(self.per_token),
            "gap_ms": percentiles(self.gaps),
        }


async def _measure(
    url: str, prompts: Sequence[str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each mode and number of clients."""
    load = _Load(url, prompts, args)
    async with load:
        refused = {mode: await load.refusal(mode) for mode in load.modes}
        modes = [mode for mode in refused if refused[mode] is None]
        rows: list[dict[str, Any]] = [
            {"mode": mode, "refused": text} for mode, text in refused.items() if text is not None
        ]
        for clients in args.clients:
            runs = {mode: _Run() for mode in modes}
            for turn in range(args.turns):
                for mode in modes if turn % 2 == 0 else reversed(modes):
                    await load.turn(runs[mode], mode, clients)
            for mode in modes:
                over = runs[mode].over(runs[modes[0]])
                rows.append(runs[mode].row(mode, clients) | {f"over_{modes[0]}": over})
                _tell(rows[-1], over)
    return rows


def _tell(row: dict[str, Any], over: float) -> None:
    print(
        f"{row['clients']} clients, {row['mode']}: {row['tokens_per_s']:.1f} tokens/s ({over:.2f})",
        file=sys.stderr,
        flush=True,
    )


def _modes(names: Sequence[str], budgets: Sequence[int] | None) -> dict[str, dict[str, Any]]:
    """Parameters by mode; ``tree`` is one mode for each budget."""
    if budgets is None:
        return {name: MODES[name] for name in names}
    modes: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == "tree":
            modes |= {f"tree {n}": MODES[name] | {"tree_budget": n} for n in budgets}
        else:
            modes[name] = dict(MODES[name])
        if name == "adaptive":
            modes[name]["tree_budget"] = max(budgets)
    return modes


class _Load:
    """The clients."""

    def __init__(self, url: str, prompts: Sequence[str], args: argparse.Namespace) -> None:
        try:
            import httpx
        except ImportError:
            raise RequestError("this benchmark needs httpx: pip install httpx") from None
        self._http: httpx.AsyncClient = httpx.AsyncClient(
            base_url=url,
            timeout=REQUEST_SECONDS,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._error = httpx.HTTPError
        self._prompts = prompts
        self._args = args
        self.modes = _modes(args.modes, args.tree_budgets)
        self._texts: dict[str, str] = {}  # by prompt, the same in all modes

    async def __aenter__(self) -> "_Load":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def refusal(self, mode: str) -> str | None:
        """Why the server cannot do this mode; a first request warms it up."""
        try:
            response = await self._http.post("/v1/completions", json=self._body(mode, 0))
        except self._error as error:
            raise RequestError(f"{self._http.base_url}: {error}") from None
        if response.status_code == REFUSED:
            return str(response.json()["error"]["message"])
        return None

    async def turn(self, run: _Run, mode: str, clients: int) -> None:
        """Each client sends its requests, one after the other."""
        tokens, started = run.tokens, time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for client in range(clients):
                    group.create_task(self._client(run, mode, client))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if isinstance(first, self._error):
                first = RequestError(f"{self._http.base_url}: {type(first).__name__}: {first}")
            raise first from None
        seconds = time.perf_counter() - started
        run.seconds += seconds
        run.speeds.append((run.tokens - tokens) / seconds)

    async def _client(self, run: _Run, mode: str, client: int) -> None:
        for i in range(self._args.requests):
            await self._request(run, mode, client * self._args.requests + i)

    async def _request(self, run: _Run, mode: str, index: int) -> None:
        body = self._body(mode, index)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        times, text, usage = [], "", None
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part = json.loads(line.removeprefix("data: "))
                if "error" in part:
                    raise RequestError(part["error"]["message"])
                if part["choices"]:
                    text += part["choices"][0]["text"]
                    times.append(time.perf_counter())
                usage = part.get("usage") or usage
        if usage is None or not times:
            raise RequestError(f"status {response.status_code}, and no answer")
        if self._texts.setdefault(body["prompt"], text) != text:
            raise RuntimeError(f"mode {mode} gave another text for {body['prompt']!r}")
        tokens = usage["completion_tokens"]
        run.requests += 1
        run.tokens += tokens
        figures = usage["speculative"]
        run.verify_forwards += figures["verify_forwards"]
        run.decoded_tokens += (figures["acceptance_length"] or 0) * figures["verify_forwards"]
        run.first.append(times[0] - started)
        run.per_token.append((times[-1] - times[0]) / max(tokens - 1, 1))
        run.gaps += [after - before for before, after in pairwise(times)]

    def _body(self, mode: str, index: int) -> dict[str, Any]:
        return {
            "prompt": self._prompts[index % len(self._prompts)],
            "max_tokens": self._args.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "speculative": self.modes[mode],
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds, by name."""
    if len(seconds) < 2:
        return {f"p{p}": 1000 * value for p in PERCENTILES for value in seconds}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": 1000 * cuts[p - 1] for p in PERCENTILES}
