"""Run the examples of docs/triton.md against a server.

Usage: triton_examples.py ENVIRONMENT REPOSITORY: starts one, runs them, stops it.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trtree.runtime.triton_repo.local_server import LocalServer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "triton.md"
_COMMANDS = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


def examples(server: LocalServer) -> Iterator[tuple[str, list[str]]]:
    """Each block as it is written, and the command that runs it, with this server's ports."""
    ports = {
        "localhost:8000": server.http_address,
        "localhost:8001": server.grpc_address,
        "localhost:8002": f"127.0.0.1:{server.metrics_port}",
    }
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        text = block
        for name, address in ports.items():
            text = text.replace(name, address)
        yield block, [*_COMMANDS[language], text]


def main() -> int:
    environment, repository = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        with LocalServer(environment.absolute(), repository, Path(folder) / "log") as server:
            print(f"tritonserver serves {repository} at {server.url}", flush=True)
            for block, command in examples(server):
                print(f"\n{block.rstrip()}\n", flush=True)
                subprocess.run(command, check=True)
        print("\nthe server has ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
