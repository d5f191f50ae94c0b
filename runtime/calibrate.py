"""Measure what an engine's passes cost on this machine, for the adaptive budget.

``python -m trtree.runtime.calibrate --engine DIR`` takes some seconds and keeps the result
in the engine directory (``calibration.json``). Let nothing else run meanwhile.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.cli import run_command, threads
from trtree.runtime.engines import load_engine
from trtree.runtime.step_costs import StepCosts, measure, save_costs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.calibrate",
        description="Measure what an engine's passes cost on this machine, for the adaptive "
        "budget, and keep it in the engine directory. Let nothing else run meanwhile.",
    )
    parser.add_argument("--engine", type=Path, default=Path("engines/demo"), help="%(default)s")
    parser.add_argument("--threads", type=threads, help="of the CPU engine; default: all")
    parser.add_argument(
        "--seconds", type=_seconds, default=8.0, help="about how long; default: %(default)s"
    )
    args = parser.parse_args(argv)
    return run_command(lambda: _run(args), (EngineDirError,))


def _run(args: argparse.Namespace) -> int:
    directory = EngineDir.open(args.engine)
    engine = load_engine(directory, num_threads=args.threads)
    with _progress() as on_progress:
        costs = measure(
            engine, seconds=args.seconds, clock=_clock(directory), on_progress=on_progress
        )
    file = save_costs(directory, costs, args.threads)
    print(_summary(costs))
    print(f"kept in {file}")
    return 0


def _clock(engine: EngineDir) -> Callable[[], float]:
    """A GPU's work is over when the clock is read: commits return before it is."""
    if not engine.manifest["backend"].startswith("tensorrt"):
        return time.perf_counter
    import torch

    def synchronized() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized


def _summary(costs: StepCosts) -> str:
    def line(what: str, points: list[tuple[float, float]]) -> str:
        return f"{what}: " + ", ".join(f"{size:g}: {1e3 * s:.3g}" for size, s in points)

    lines = [line("target pass, ms by rows", costs.verify)]
    if costs.draft:
        lines.append(line("drafter pass, ms by requests", costs.draft))
        lines.append(line("drafter's context, ms by committed rows", costs.extend))
    lines.append(f"a row, ms by 1000 tokens of context: {1e6 * costs.row_context_seconds:.3g}")
    return "\n".join(lines)


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on a terminal; silent in a pipe."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("calibrating", total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 600.0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0 and at most 600")
    return value


if __name__ == "__main__":
    sys.exit(main())
