"""Make the demo pair: ``python -m trtree.runtime.bench.train_demo --work DIR --out DIR``.

Stages, in order: target, export, rollouts, drafter, more_rollouts, refine, evaluate. Without one
named, all run; each finds in --work and --out what the ones before it left. Needs the ``oracle``
extra and dflash 0.1.0, installed without its dependencies; about an hour on two free cores. The
target's training goes on from `WORK/checkpoint.pt` if there is one. Setting
MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ to a gigabyte or so helps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from .pipeline import STAGES, Folders, Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.bench.train_demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--work", type=Path, default=Path("train_demo/work"))
    parser.add_argument("--out", type=Path, default=Path("train_demo/out"))
    arguments = parser.parse_args()
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    run(Plan(), Folders(arguments.work, arguments.out), arguments.stages or STAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
