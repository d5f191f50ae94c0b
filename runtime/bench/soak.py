"""The server under mixed load for a long time: what it holds, and whether answers change.

Starts the server on an engine. Clients send, at random, completions from a fixed set:
greedy and sampled, n > 1, streamed and not, in every mode; some leave in the middle, some
ask for what is refused. Every answer must equal the first to the same request, whatever
ran beside it and in whichever mode (a seed is a text). From time to time the clients
pause: then no request may be left, no KV page in use. At the end resident memory may have
grown by --max-growth-mib since the first pause, and open files not at all.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trtree.runtime.bench.serve import MODES, REFUSED, REQUEST_SECONDS, percentiles, serving
from trtree.runtime.cli import positive
from trtree.runtime.generate import read_prompts
from trtree.runtime.session import RequestError

REQUESTS = 48  # different ones
IDLE_SECONDS = 60  # within which a server without clients must be empty
LEAVE, REFUSE = 0.15, 0.05  # shares of all requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--engine", type=Path, default=Path("engines/demo"), help="default: %(default)s"
    )
    parser.add_argument("--minutes", type=positive, default=30, help="default: %(default)s")
    parser.add_argument(
        "--clients", type=positive, default=16, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--pause-every", type=positive, default=30, metavar="S", help="default: %(default)s"
    )
    parser.add_argument(
        "--max-growth-mib",
        type=positive,
        default=64,
        help="more than the KV pool, which takes memory as pages are first used; "
        "default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the load; default: %(default)s")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path("configs/demo/prompts.txt"),
        help="one a line; default: %(default)s",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the server, loads it, checks.

    Raises:
        RequestError: the server failed, or the engine cannot be served.
        RuntimeError: an answer changed, pages or files stayed in use, or memory grew.
    """
    prompts = read_prompts(args.prompts)
    with serving(args.engine) as (url, process):
        soak = Soak(url, prompts, args.clients, args.seed)
        modes, held = asyncio.run(_go(soak, args, process))
    growth = held[-1]["resident_mib"] - held[0]["resident_mib"]
    if growth > args.max_growth_mib:
        raise RuntimeError(f"the server grew by {growth} MiB: {held}")
    if held[-1]["open_files"] > held[0]["open_files"]:
        raise RuntimeError(f"files stay open: {held[0]} at first, {held[-1]} at last")
    return {
        "engine": str(args.engine),
        "minutes": args.minutes,
        "clients": args.clients,
        "modes": modes,
        "resident_mib": [at["resident_mib"] for at in held],  # at each pause
        "open_files": [at["open_files"] for at in held],
    } | soak.figures()


async def _go(
    soak: "Soak", args: argparse.Namespace, process: int
) -> tuple[list[str], list[dict[str, int]]]:
    """The modes in use, and what the process held at every pause."""
    held = []
    end = time.monotonic() + 60 * args.minutes
    async with soak:
        modes = await soak.find_modes()
        while (now := time.monotonic()) < end:
            await soak.load(min(args.pause_every, end - now))
            await asyncio.sleep(1)  # until the server knows who has gone, and its figures say so
            await soak.wait_until_empty()
            held.append(_held(process))
    return modes, held


def _held(process: int) -> dict[str, int]:
    folder = Path("/proc", str(process))
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "resident_mib": pages * resource.getpagesize() >> 20,
        "open_files": len(list((folder / "fd").iterdir())),
    }


class Soak:
    """The clients and what they were answered."""

    def __init__(self, url: str, prompts: Sequence[str], clients: int, seed: int) -> None:
        try:
            import httpx
        except ImportError:
            raise RequestError("this benchmark needs httpx: pip install httpx") from None
        self._connect: Callable[[], httpx.AsyncClient] = partial(
            httpx.AsyncClient, base_url=url, timeout=REQUEST_SECONDS
        )
        self._http = self._connect()
        self._errors = (httpx.HTTPError, TimeoutError)
        self._rngs = [random.Random(f"{seed} {client}") for client in range(clients)]
        rng = random.Random(seed)
        self._requests = [_request(rng, prompts) for _ in range(REQUESTS)]
        self._modes: list[dict[str, Any]] = []
        self._first: dict[int, list[str]] = {}  # answers, by request
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []

    async def __aenter__(self) -> "Soak":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def figures(self) -> dict[str, Any]:
        """Requests by what became of them, and seconds of those answered whole."""
        return dict(self._counts) | {
            "different_requests": len(self._first),
            "request_ms": percentiles(self._seconds),
        }

    async def find_modes(self) -> list[str]:
        """Those the engine has; adaptive needs its calibration."""
        found = []
        for name, speculative in MODES.items():
            body = {"prompt": "a", "max_tokens": 1, "speculative": speculative}
            response = await self._http.post("/v1/completions", json=body)
            if response.is_success:
                found.append(name)
                self._modes.append(speculative)
        return found

    async def load(self, seconds: float) -> None:
        """All clients send one request after the other for so long, and wait for answers."""
        end = time.monotonic() + seconds
        try:
            async with asyncio.TaskGroup() as group:
                for rng in self._rngs:
                    group.create_task(self._client(rng, end))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if isinstance(first, self._errors):
                first = RequestError(f"{self._http.base_url}: {type(first).__name__}: {first}")
            raise first from None
        await self._http.aclose()  # no connection is kept over the pause
        self._http = self._connect()

    async def wait_until_empty(self) -> None:
        """Until no request and no page is held.

        Raises:
            RuntimeError: they still are after a minute.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while busy := await self._busy():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no client sends, and still: {busy}")
            await asyncio.sleep(0.1)

    async def _busy(self) -> dict[str, float]:
        text = (await self._http.get("/metrics")).text
        value = {
            name: sum(map(float, re.findall(rf"^trtree_{name}(?:{{.*}})? (\S+)$", text, re.M)))
            for name in (
                *("requests_running", "requests_waiting"),
                *("kv_pages", "kv_pages_free", "kv_pages_cached"),
            )
        }
        used = value.pop("kv_pages") - value.pop("kv_pages_free") - value.pop("kv_pages_cached")
        return {name: n for name, n in (value | {"kv_pages_used": used}).items() if n}

    async def _client(self, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            index = rng.randrange(REQUESTS)
            body = self._requests[index] | {"speculative": rng.choice(self._modes)}
            kind = rng.random()
            if kind < LEAVE:
                await self._leave(body, rng)
            elif kind < LEAVE + REFUSE:
                await self._refused(body)
            else:
                started = time.perf_counter()
                texts = await (self._stream if rng.random() < 0.5 else self._whole)(body)
                self._seconds.append(time.perf_counter() - started)
                self._check(index, body, texts)

    def _check(self, index: int, body: dict[str, Any], texts: list[str]) -> None:
        if self._first.setdefault(index, texts) != texts:
            raise RuntimeError(f"{body} gave {texts}, and {self._first[index]} before")
        self._counts["answered_greedy" if not body["temperature"] else "answered_sampled"] += 1

    async def _whole(self, body: dict[str, Any]) -> list[str]:
        response = await self._http.post("/v1/completions", json=body)
        if not response.is_success:
            raise RequestError(f"status {response.status_code} for {body}: {response.text}")
        return [choice["text"] for choice in response.json()["choices"]]

    async def _stream(self, body: dict[str, Any]) -> list[str]:
        texts = [""] * body["n"]
        done = False
        async with self._http.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as response:
            async for line in response.aiter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    part = json.loads(line.removeprefix("data: "))
                    if "error" in part:
                        raise RequestError(f"{part['error']['message']} for {body}")
                    for choice in part["choices"]:
                        texts[choice["index"]] += choice["text"]
        if not done:
            raise RequestError(f"status {response.status_code}, a stream without end: {body}")
        return texts

    async def _leave(self, body: dict[str, Any], rng: random.Random) -> None:
        """A client that goes away, before or in the middle of its answer."""
        whole = self._stream if rng.random() < 0.5 else self._whole
        try:
            async with asyncio.timeout(rng.choice([0.005, 0.02, 0.1, 0.5])):
                await whole(body | {"max_tokens": 512, "ignore_eos": True})
        except TimeoutError:
            self._counts["left"] += 1
        else:
            self._counts["answered_before_leaving"] += 1

    async def _refused(self, body: dict[str, Any]) -> None:
        response = await self._http.post("/v1/completions", json=body | {"max_tokens": 10**6})
        if response.status_code != REFUSED:
            raise RequestError(f"max_tokens {10**6}: status {response.status_code}")
        self._counts["refused"] += 1


def _request(rng: random.Random, prompts: Sequence[str]) -> dict[str, Any]:
    """A completion whose answer is always the same, as its seed is given."""
    greedy = rng.random() < 0.5
    body: dict[str, Any] = {
        "prompt": " ".join(rng.choices(prompts, k=rng.choice([1, 1, 3, 8]))),
        "max_tokens": rng.choice([1, 8, 32, 64, 128]),
        "temperature": 0,
        "n": 1,
        "ignore_eos": rng.random() < 0.5,
    }
    if not greedy:
        body |= {
            "temperature": rng.choice([0.5, 1.0]),
            "top_p": rng.choice([0.9, 1.0]),
            "n": rng.choice([1, 1, 3]),
            "seed": rng.randrange(1000),
            "repetition_penalty": rng.choice([1.0, 1.1]),
        }
    if rng.random() < 0.3:
        body["stop"] = rng.choice([["."], [" the", ","], ["\n"]])
    return body
