"""`python -m trtree.runtime.bench NAME`: one benchmark, its result printed as JSON."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol, cast

from trtree.build.checkpoint import CheckpointError
from trtree.build.engine_dir import EngineDirError
from trtree.build.network.network import NetworkError
from trtree.build.options import OptionError
from trtree.runtime.cli import run_command
from trtree.runtime.session import RequestError

# A benchmark is a module of this package with this name. Its docstring is its help.
BENCHES = ("decode", "experts", "gpu", "linear", "serve", "soak", "tree")
ERRORS = (CheckpointError, NetworkError, OptionError, EngineDirError, RequestError)


class Bench(Protocol):
    """What each of those modules has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        """Measures, and returns what `json.dumps` takes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.bench", description="Benchmarks; each prints JSON."
    )
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name in BENCHES:
        module = importlib.import_module(f"trtree.runtime.bench.{name}")
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        bench = cast(Bench, module)
        bench.add_arguments(command)
        command.set_defaults(run=bench.run)
    args = parser.parse_args(argv)
    return run_command(lambda: _print(args), ERRORS)


def _print(args: argparse.Namespace) -> int:
    print(json.dumps(args.run(args), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
