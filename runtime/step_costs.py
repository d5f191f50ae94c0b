"""What the parts of a round cost on this machine: measured, kept with the engine, read back.

The adaptive budget weighs draft trees by these costs (``runtime/cpp/tree_policy.hpp``).
``calibration.json`` holds one entry for each machine, known by its processor, threads,
GPU, versions and the engine itself; an entry of another machine is never used.
"""

import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trtree import _core
from trtree.build.engine_dir import EngineDir, EngineDirError

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
EXTENDED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 32  # committed tokens of each request, where the engine has room
LONG_CONTEXT = 512
CONTEXT_ROWS = 16  # of the step that long and short contexts are compared with
MIN_REPEATS = 3
_SECTION = "costs"
_FORMAT = "2"  # of an entry: what is measured

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a target pass with its commit by rows, of a drafter pass by requests, what a
    row takes more for each committed token before it, and what a commit takes more that extends
    the drafter's context, by committed rows.

    Each is the least of several: what else the machine does can only add to it.
    """

    verify: Points
    draft: Points
    row_context_seconds: float
    extend: Points

    def model(self) -> _core.CostModel:
        """The costs in between; see ``runtime/cpp/cost_model.hpp``."""
        return _core.CostModel(self.verify, self.draft, self.row_context_seconds, self.extend)


def machine(engine: EngineDir, num_threads: int | None = None) -> dict[str, str]:
    """What costs depend on. num_threads: of the CPU engine; default as when loading it."""
    return {
        "format": _FORMAT,
        "processor": _processor(),
        "threads": str(num_threads or len(os.sched_getaffinity(0))),
        "gpu": _gpu(engine),
        "trtree": version("trtree"),
        "engine": engine.fingerprint(),
    }


def save_costs(engine: EngineDir, costs: StepCosts, num_threads: int | None = None) -> Path:
    """Keep costs with the engine, in place of this machine's earlier ones."""
    here = machine(engine, num_threads)
    calibration = engine.calibration()
    others = [entry for entry in _entries(engine) if entry["machine"] != here]
    calibration[_SECTION] = [*others, {"machine": here, **asdict(costs)}]
    return engine.write_calibration(calibration)


def load_costs(
    engine: EngineDir,
    num_threads: int | None = None,
    *,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> StepCosts | None:
    """This machine's costs, or none. ``say`` is told of costs that are another machine's.

    Raises:
        EngineDirError: the calibration is damaged.
    """
    here = machine(engine, num_threads)
    entries = _entries(engine)
    for entry in entries:
        if entry["machine"] == here:
            return _costs(engine, entry)
    if entries:
        there = entries[-1]["machine"]
        differ = [key for key in here if there.get(key) != here[key]]
        values = "; ".join(
            f"{key} {there.get(key)!r:.60}, here {here[key]!r:.60}" for key in differ
        )
        say(
            f"{engine.path}: ignoring the calibration of another machine ({values}); run "
            f"python -m trtree.runtime.calibrate --engine {engine.path}"
        )
    return None


def measure(
    engine: _core.Engine,
    *,
    seconds: float = 8.0,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[float], None] = lambda share: None,
) -> StepCosts:
    """Time target and drafter passes of an engine that nothing else is using.

    ``seconds``: about how long, once each size was run once; sizes that alone take longer
    are left out. ``on_progress`` is told the share that is done.
    """
    return _Measurement(engine, seconds, clock, on_progress).run()


class _Measurement:
    """Requests of random tokens, and the passes over them."""

    def __init__(
        self,
        engine: _core.Engine,
        seconds: float,
        clock: Callable[[], float],
        on_progress: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._c = c = engine.capabilities()
        self._clock, self._on_progress = clock, on_progress
        self._rng = random.Random(0)
        self._width = min(c.verify_width, c.max_num_rows)
        room = c.max_seq_len - max(self._width, c.block_size)
        self._context = max(1, min(CONTEXT, room))
        self._long = min(LONG_CONTEXT, room)
        self._long_pages = self._pages(self._long)
        self._paged = c.kv_layout == _core.KvLayout.PAGED
        self._started = clock()
        self._deadline = self._started + seconds
        self._lengths: dict[int, int] = {}  # committed, of each request that has begun

    def _pages(self, context: int) -> int:
        tokens = context + max(self._width, self._c.block_size)
        return -(-tokens // self._c.page_size) if self._c.page_size else 0

    def _most_requests(self) -> int:
        """The first request has room for the long context, the others for the short one."""
        if not self._paged:
            return self._c.max_batch_size
        left = self._c.num_pages - self._long_pages
        return max(1, min(self._c.max_batch_size, 1 + left // self._pages(self._context)))

    def run(self) -> StepCosts:
        requests = self._most_requests()
        if self._paged and self._long_pages > self._c.num_pages:
            self._long, self._long_pages = self._context, self._pages(self._context)
        most_rows = min(self._c.max_num_rows, requests * self._width)
        verify = {rows: list[float]() for rows in ROWS if rows <= most_rows}
        drafts = self._c.block_size > 1
        draft = {n: list[float]() for n in REQUESTS if drafts and n <= requests}
        extend = {n: list[float]() for n in EXTENDED if drafts and n <= most_rows}
        commit = {n: list[float]() for n in extend}
        passes = (
            (verify, self._verify),
            (draft, self._draft),
            (extend, partial(self._commit, extend_drafter=True)),
            (commit, partial(self._commit, extend_drafter=False)),
        )
        self._first_pass(passes)
        while self._time_left() or len(verify[1]) < MIN_REPEATS:
            for times, run in passes:
                for size, found in times.items():
                    found.append(run(size))
        per_context = self._per_context()
        context = per_context * self._context  # of a row, in what was measured
        self._on_progress(1.0)
        more = {n: [min(extend[n]) - min(commit[n])] for n in extend if n in commit}
        return StepCosts(_least(verify, context), _least(draft), per_context, _least(more))

    def _first_pass(
        self, passes: Sequence[tuple[dict[int, list[float]], Callable[[int], float]]]
    ) -> None:
        """Time each size once, small ones first; drop the sizes that there is no time for."""
        sizes = [(size, times, run) for times, run in passes for size in times]
        for size, times, run in sorted(sizes, key=lambda entry: entry[0]):
            if size == 1:
                run(size)  # what is slow once
            # Without a second size, all would seem to cost what the first does.
            if size <= 2 or self._time_left():
                times[size].append(run(size))
            else:
                del times[size]

    def _time_left(self) -> bool:
        now = self._clock()
        self._on_progress(min(0.95, (now - self._started) / (self._deadline - self._started)))
        return now < self._deadline

    def _per_context(self) -> float:
        """Seconds that a row takes more for each committed token, if any."""
        rows = min(CONTEXT_ROWS, self._width)
        if self._long < 2 * self._context:
            return 0.0
        short = min(self._verify(rows) for _ in range(4 * MIN_REPEATS))
        self._extend(0, self._long)
        long = min(self._verify(rows) for _ in range(4 * MIN_REPEATS))
        return max(0.0, (long - short) / (rows * (self._long - self._context)))

    def _verify(self, rows: int) -> float:
        """Seconds of a target pass over as few requests as can hold the rows, and of its
        commit, which leaves the drafter's context as it is."""
        at, started = self._step(rows)
        self._engine.commit([_core.Commit(sequence, [0], False) for sequence, _ in at])
        return self._clock() - started

    def _commit(self, rows: int, *, extend_drafter: bool) -> float:
        """Seconds of the commit of all rows of a target pass."""
        at, _ = self._step(rows)
        commits = [
            _core.Commit(sequence, list(range(count)), extend_drafter) for sequence, count in at
        ]
        started = self._clock()
        self._engine.commit(commits)
        return self._clock() - started

    def _step(self, rows: int) -> tuple[list[tuple[_core.Sequence, int]], float]:
        """A target pass over as few requests as can hold the rows: each with its number of
        rows, and when the pass began."""
        counts = [self._width] * (rows // self._width)
        if rows % self._width:
            counts.append(rows % self._width)
        at = [self._sequence(index) for index in range(len(counts))]
        batch = _batch(at, [self._tokens(count) for count in counts], outputs=True)
        started = self._clock()
        self._engine.step(batch)
        return list(zip(at, counts, strict=True)), started

    def _draft(self, count: int) -> float:
        at = [self._sequence(index) for index in range(count)]
        requests = [_core.DraftRequest(sequence, self._tokens(1)[0]) for sequence in at]
        top_k = max(1, min(self._c.max_top_k, self._width - 1))
        started = self._clock()
        self._engine.draft(requests, top_k)
        return self._clock() - started

    def _sequence(self, index: int) -> _core.Sequence:
        self._extend(index, self._context)
        return self._at(index)

    def _at(self, index: int) -> _core.Sequence:
        pages: range = range(0)
        if self._paged:
            first, short = self._long_pages, self._pages(self._context)
            pages = (
                range(first)
                if index == 0
                else range(first + (index - 1) * short, first + index * short)
            )
        return _core.Sequence(index + 1, index, self._lengths[index], list(pages))

    def _extend(self, index: int, context: int) -> None:
        """Commit random tokens until the request has `context` of them."""
        self._lengths.setdefault(index, 0)
        while (missing := context - self._lengths[index]) > 0:
            at = self._at(index)
            tokens = self._tokens(min(missing, self._c.max_num_rows))
            self._engine.step(_batch([at], [tokens], outputs=False))
            self._engine.commit(
                [_core.Commit(at, list(range(len(tokens))), self._c.block_size > 1)]
            )
            self._lengths[index] += len(tokens)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._c.vocab_size) for _ in range(count)]


def _batch(at: list[_core.Sequence], tokens: list[list[int]], *, outputs: bool) -> _core.RowBatch:
    """Each request's tokens as a chain; with ``outputs``, an argmax of every row."""
    segments = []
    for sequence, ids in zip(at, tokens, strict=True):
        rows = list(range(len(ids)))
        parents = [row - 1 for row in rows]
        segments.append(
            _core.SegmentRequest(sequence, ids, parents, rows if outputs else rows[-1:])
        )
    return _core.RowBatch(segments)


def _least(times: dict[int, list[float]], less: float = 0.0) -> Points:
    """The least of each size's times, without ``less`` for each unit of size."""
    # A clock too coarse for a pass must not make it free.
    return [(size, max(1e-9, min(found) - less * size)) for size, found in times.items()]


def _entries(engine: EngineDir) -> list[dict[str, Any]]:
    entries = engine.calibration().get(_SECTION, [])
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("machine"), dict) for entry in entries
    ):
        raise _damaged(engine, f"{_SECTION} is no list of machines")
    return entries


def _costs(engine: EngineDir, entry: dict[str, Any]) -> StepCosts:
    try:
        costs = StepCosts(
            [(float(size), float(seconds)) for size, seconds in entry["verify"]],
            [(float(size), float(seconds)) for size, seconds in entry["draft"]],
            float(entry["row_context_seconds"]),
            [(float(size), float(seconds)) for size, seconds in entry["extend"]],
        )
        costs.model()
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(engine, repr(error)) from None
    return costs


def _damaged(engine: EngineDir, why: str) -> EngineDirError:
    return EngineDirError(
        f"{engine.path}: the calibration cannot be read ({why}); delete it and calibrate again"
    )


def _processor() -> str:
    """The processor's model name."""
    return next(_cpuinfo("model name"), platform.processor() or platform.machine())


def _cpuinfo(key: str) -> Iterator[str]:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            yield value.strip()


def _gpu(engine: EngineDir) -> str:
    """The GPU's name, for engines that run on one."""
    if not engine.manifest["backend"].startswith("tensorrt"):
        return ""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
