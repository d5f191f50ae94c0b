"""What the commands have in common: one-line errors, exit codes, progress."""

import sys
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


def run_command(command: Callable[[], int], errors: tuple[type[Exception], ...]) -> int:
    """Run a command; the named errors become one line on stderr and exit code 2."""
    try:
        return command()
    except errors as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does.
        sys.stderr.close()
        return 0


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
