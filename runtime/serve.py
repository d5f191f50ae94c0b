#!/usr/bin/env python3
"""Serve an engine: ``mpirun -n RANKS runtime/serve.py --engine DIR``. See --help."""

import sys

if not __package__:
    # Run as a script: this folder's modules must not stand in for packages of their names.
    del sys.path[0]

try:
    from trtree.runtime.server.command import main
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] == "trtree":
        raise
    print(f"error: there is no {error.name}; pip install '.[serve]'", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
