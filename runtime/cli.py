"""What the commands have in common: argument types, one-line errors, exit codes, progress."""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
INT32_MAX = 2**31 - 1
MAX_THREADS = 256
# Packages that not every command needs, and the extra of pyproject.toml that brings each.
_EXTRAS = {
    "fastapi": "serve",
    "modelopt": "modelopt",
    "mpi4py": "mpi",
    "prometheus_client": "serve",
    "tensorrt_rtx": "tensorrt-rtx",
    "transformers": "modelopt",
    "triton": "gpu",
    "uvicorn": "serve",
}


class Terminated(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt, nothing but clean-up should catch it."""


def integer(least: int, most: int = INT32_MAX) -> Callable[[str], int]:
    """An argparse type: an integer from ``least`` to ``most``."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    parse.__name__ = "integer"  # argparse names it where text is no number
    return parse


positive = integer(1)
threads = integer(1, MAX_THREADS)


def run_command(command: Callable[[], int], errors: tuple[type[Exception], ...]) -> int:
    """Run a command; the named errors and a package that is not installed become one line on
    stderr and exit code 2.

    SIGTERM, like SIGINT, ends the command by an exception, so that what it was writing
    is removed.
    """
    try:
        with _sigterm_raises():
            return command()
    except errors as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "trtree":
            raise
        extra = _EXTRAS.get(package)
        fix = f"pip install '.[{extra}]'" if extra else f"pip install {package}"
        print(f"error: this needs {package}, which is not installed; {fix}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Terminated:
        print("terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does.
        sys.stderr.close()
        return 0


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop clean-up
        raise Terminated

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # Only the main thread may; and whoever set a handler keeps it.
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left on a terminal; silent in a pipe. Yields advance(bytes)."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
