"""``python -m trtree.runtime.triton_repo``: write a model repository for an engine."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trtree.build.engine_dir import EngineDirError
from trtree.runtime.cli import integer, run_command, threads
from trtree.runtime.triton_repo.layouts import LAYOUTS
from trtree.runtime.triton_repo.model_config import ModelConfigError
from trtree.runtime.triton_repo.repository import RepositoryError, write_repository
from trtree.runtime.triton_repo.settings import EngineSettings, SettingsError

ERRORS = (EngineDirError, ModelConfigError, RepositoryError, SettingsError)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    return run_command(lambda: _run(args), ERRORS)


def _run(args: argparse.Namespace) -> int:
    settings = EngineSettings(
        threads=args.threads,
        prefix_cache=args.prefix_cache,
        max_queue_size=args.max_queue_size,
        speculative_mode=args.mode,
        speculative_tree_budget=args.tree_budget,
        mpirun=args.mpirun,
        job_socket=args.job_socket,
    )
    names = write_repository(
        args.engine,
        args.output,
        layout=args.layout,
        settings=settings,
        decoupled=args.decoupled,
        force=args.force,
    )
    print(f"{args.output}: {', '.join(names)}")
    print(f"tritonserver --model-repository={args.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    default = EngineSettings()
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.triton_repo",
        description="Write a Triton model repository for an engine. Every engine has one in its "
        "folder triton; this writes others.",
    )
    add = parser.add_argument
    add("--engine", type=Path, required=True, metavar="DIR", help="engine directory")
    add("--output", type=Path, required=True, metavar="REPO", help="repository to write")
    add(
        "--layout",
        choices=LAYOUTS,
        default="llmapi",
        help="llmapi: one model, trtree, with text in and out. inflight_batcher: ensemble, "
        "preprocessing, tensorrt_llm, postprocessing and tensorrt_llm_bls. both: each has an "
        "engine of its own; load what you need (default: %(default)s)",
    )
    add("--force", action="store_true", help="replace a repository that is already there")
    add(
        "--decoupled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stream; without, requests have one response each, and plain inference requests "
        "(/v2/models/NAME/infer) are answered (default: yes)",
    )
    add(
        "--mode",
        choices=("plain", "chain", "tree"),
        help="how to decode where a request does not say (default: tree, plain if the engine "
        "has no drafter)",
    )
    add(
        "--tree-budget",
        type=integer(0),
        metavar="N",
        help="tree nodes besides the root, where a request does not say (default: the engine's)",
    )
    add("--threads", type=threads, metavar="N", help="threads of the CPU engine, on each rank")
    add(
        "--max-queue-size",
        type=integer(0),
        default=default.max_queue_size,
        metavar="N",
        help="requests that may wait, 0 for any number (default: %(default)s)",
    )
    add("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--mpirun",
        default=default.mpirun,
        metavar="COMMAND",
        help="launcher for an engine of several ranks (default: %(default)s)",
    )
    add(
        "--job-socket",
        default="",
        metavar="PATH",
        help="socket of a job that runs already (python -m trtree.runtime.triton_repo.job), "
        "instead of starting one",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
