"""``python -m trtree.build.bench NAME``: one benchmark, its result printed as JSON."""

import argparse
import json
import sys
from collections.abc import Sequence

from trtree.build.bench import build, convert
from trtree.build.checkpoint import CheckpointError
from trtree.build.engine_dir import EngineDirError
from trtree.build.network.network import NetworkError
from trtree.build.options import OptionError
from trtree.runtime.cli import run_command

# A benchmark is a module of this package; its docstring is its help.
BENCHES = {"build": build, "convert": convert}
ERRORS = (CheckpointError, NetworkError, OptionError, EngineDirError)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.build.bench", description="Benchmarks; each prints JSON."
    )
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, bench in BENCHES.items():
        text = (bench.__doc__ or "").strip()
        command = commands.add_parser(name, help=text.splitlines()[0], description=text)
        bench.add_arguments(command)
        command.set_defaults(run=bench.run)
    args = parser.parse_args(argv)
    return run_command(lambda: _print(args), ERRORS)


def _print(args: argparse.Namespace) -> int:
    print(json.dumps(args.run(args), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
