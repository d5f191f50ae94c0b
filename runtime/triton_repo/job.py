"""``mpirun -n RANKS python -m trtree.runtime.triton_repo.job``: an engine for Triton's model.

The model starts such a job itself where its engine has several ranks, and it ends with the
model. One that you start yourself (over several nodes, or with replicas) stays: name its
socket in the repository with ``--job-socket``.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path

from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.distributed.job import JobError, open_job
from trtree.runtime.executor import ExecutorConfig
from trtree.runtime.triton_repo.remote_job import serve
from trtree.runtime.triton_repo.settings import EngineSettings, SettingsError

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")

    def configuration(engine: EngineDir) -> ExecutorConfig:
        return settings.executor_config(engine)

    try:
        settings = EngineSettings.from_json(args.settings) if args.settings else EngineSettings()
        with open_job(
            args.engine, executor_config=configuration, num_threads=settings.threads
        ) as job:
            if not job.is_leader:
                job.work()
                return 0
            if args.connect:
                with Client(args.connect, "AF_UNIX") as model:
                    serve(model, job.executors)
                return 0
            with _listen(args.socket) as listener:
                _log.info("%s waits for Triton's model at %s", args.engine, args.socket)
                while True:
                    with listener.accept() as model:
                        serve(model, job.executors)
    except (EngineDirError, JobError, OSError, SettingsError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _listen(path: str) -> Listener:
    """A socket that only its owner can open."""
    Path(path).unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        return Listener(path, "AF_UNIX")
    finally:
        os.umask(mask)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trtree.runtime.triton_repo.job", description=__doc__
    )
    parser.add_argument("--engine", type=Path, required=True, metavar="DIR")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", metavar="PATH", help="Unix socket to listen on, on rank 0")
    where.add_argument(
        "--connect", metavar="PATH", help="Unix socket of the one model to serve, then end"
    )
    parser.add_argument(
        "--settings",
        metavar="JSON",
        help=f"of the executor, by name: {json.dumps(EngineSettings().to_json_dict())}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
