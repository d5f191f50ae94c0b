"""The command behind ``runtime/serve.py``: options, the engine, the HTTP server."""

import argparse
import json
import logging
import queue
import resource
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from trtree._core import KvLayout
from trtree.build.engine_dir import EngineDir, EngineDirError
from trtree.runtime.cli import integer, run_command, threads
from trtree.runtime.distributed.job import Job, JobError, open_job
from trtree.runtime.executor import ExecutorConfig, KvCacheConfig, Request, executor_config
from trtree.runtime.server import http
from trtree.runtime.server.app import Settings, create_app
from trtree.runtime.server.options import (
    API_KEY_VARIABLE,
    MODES,
    POLICIES,
    ServeOptionError,
    ServeOptions,
    read_serve_options,
)
from trtree.runtime.server.protocol import Speculative
from trtree.runtime.service import Chunk, Service, Submission
from trtree.runtime.session import RequestError
from trtree.runtime.trace import TraceError, TraceWriter

_log = logging.getLogger(__name__)
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "serve.yaml"
ERRORS = (
    http.AddressError,
    EngineDirError,
    JobError,
    RequestError,
    ServeOptionError,
    TraceError,
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    return run_command(lambda: _run(args), ERRORS)


def _run(args: argparse.Namespace) -> int:
    options = _options(args)
    api_key = options.api_key()
    with ExitStack() as stack:
        sockets: list[socket.socket] = []

        def listen() -> None:
            """A taken port is found before the engine is loaded for nothing."""
            sockets.append(stack.enter_context(http.bind(options.host, options.port)))

        job = stack.enter_context(
            open_job(
                options.engine,
                tp=options.tp,
                dp=options.dp,
                executor_config=lambda engine: _executor_config(engine, options),
                prepare=listen,
                num_threads=options.threads,
            )
        )
        if not job.is_leader:
            job.work()
            return 0
        return _lead(job, options, sockets[0], api_key)


def _executor_config(engine: EngineDir, options: ServeOptions) -> ExecutorConfig:
    config = executor_config(engine, options.threads)
    config.max_queue_size = options.max_queue_size
    config.kv_cache_config = KvCacheConfig(enable_block_reuse=options.prefix_cache)
    config.allow_unsafe_tree_state = options.allow_unsafe_tree_state
    config.record_rounds = options.trace is not None
    return config


def _lead(job: Job, options: ServeOptions, sock: socket.socket, api_key: str | None) -> int:
    if options.prefix_cache and job.capabilities.kv_layout == KvLayout.CONTIGUOUS:
        _log.info("prefix cache: off, as this engine's KV is contiguous")
    trace = TraceWriter(options.trace, options.engine) if options.trace else None
    service = Service(job.engine_dir, job.executors, round_log=trace)

    def health() -> dict[int, str | None]:
        lost = job.health()
        return {
            rank: "does not answer" if rank in lost else None
            for rank in range(job.layout.world_size)
        }

    try:
        return _serve(options, service, health, sock, api_key)
    finally:
        with job.ending():
            service.close()
        if trace is not None:
            trace.close()


def _serve(
    options: ServeOptions,
    service: Service,
    health: Callable[[], Mapping[int, str | None]],
    sock: socket.socket,
    api_key: str | None,
) -> int:
    values = {"mode": options.mode, "tree_budget": options.tree_budget, "policy": options.policy}
    speculative = Speculative.model_validate(values)
    _warm_up(service, speculative)
    settings = Settings(
        options.model,
        speculative,
        api_key,
        max_body_bytes=options.max_body_mib << 20,
        max_unread_bytes=options.max_unread_mib << 20,
        stall_seconds=options.stall_seconds,
        health=health,
    )
    _raise_file_limit()
    http.serve(
        create_app(service, settings),
        service,
        sock,
        drain_seconds=options.drain_seconds,
        stall_seconds=options.stall_seconds,
        on_ready=lambda: _announce(http.url(sock), options, with_key=api_key is not None),
    )
    return 0 if service.failure is None else 1


def _warm_up(service: Service, speculative: Speculative) -> None:
    """Two tokens, so that options that no request could use are refused at the start."""
    config = service.speculative_config(**speculative.model_dump(exclude_unset=True))
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    service.submit(Submission(Request([0], 2, speculative=config)), chunks.put)
    while (finish := chunks.get().finish) is None:
        pass
    if finish.error is not None:
        raise EngineDirError(f"{service.engine_dir.path}: {finish.error}")


def _raise_file_limit() -> None:
    """Each connection is a file; the usual soft limit of 1,024 is for programs that select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(url: str, options: ServeOptions, *, with_key: bool) -> None:
    body = {"model": options.model, "prompt": "Hello", "max_tokens": 32}
    key = f"$(cat {shlex.quote(str(options.api_key_file))})" if options.api_key_file else None
    bearer = f' -H "Authorization: Bearer {key or f"${API_KEY_VARIABLE}"}"' if with_key else ""
    print(
        f"trtree serves {options.model} at {url} (Ctrl-C ends it). Try:\n\n"
        f"curl {url}/v1/completions -H 'Content-Type: application/json'{bearer} "
        f"-d {shlex.quote(json.dumps(body))}\n",
        flush=True,
    )


def _options(args: argparse.Namespace) -> ServeOptions:
    """The configuration file's options, overridden by the flags given."""
    names = {field.name for field in fields(ServeOptions)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    file = args.config or (CONFIG if CONFIG.is_file() else None)
    options = read_serve_options(file) if file else ServeOptions()
    return options.with_overrides(flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve.py",
        description="Serve an engine with OpenAI's HTTP API: mpirun -n RANKS runtime/serve.py, "
        "or without mpirun on one rank.",
        epilog=f"The API key, if there is one, comes from the environment ({API_KEY_VARIABLE}) or "
        "--api-key-file. Exit codes: 0 ended by SIGTERM or Ctrl-C, 1 the engine failed, "
        "2 bad input, 143 terminated while starting.",
    )
    _add_engine_and_address(parser)
    _add_ranks(parser)
    _add_decoding(parser)
    _add_limits(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a line for each request and round; python -m trtree.runtime.trace shows it",
    )
    return parser


def _add_engine_and_address(parser: argparse.ArgumentParser) -> None:
    default = ServeOptions()
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of options (default: serve.yaml)"
    )
    parser.add_argument(
        "--engine", type=Path, metavar="DIR", help=f"engine directory (default: {default.engine})"
    )
    parser.add_argument(
        "--host", help=f"address to listen on; 0.0.0.0 for all (default: {default.host})"
    )
    parser.add_argument(
        "--port",
        type=integer(0, 65535),
        help=f"port to listen on; 0 for any that is free (default: {default.port})",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name (default: the engine's)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the key that /v1 asks for"
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp", type=integer(1), metavar="N", help="ranks of the engine; must be what it has"
    )
    parser.add_argument(
        "--dp",
        type=integer(1),
        metavar="N",
        help="replicas of the engine (default: as many as fit)",
    )
    parser.add_argument(
        "--threads",
        type=threads,
        metavar="N",
        help="threads of the CPU engine (default: the processors this process may use)",
    )


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    default = ServeOptions()
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="how to decode where a request does not say "
        "(default: tree, plain if the engine has no drafter)",
    )
    parser.add_argument(
        "--tree-budget",
        type=integer(0),
        metavar="N",
        help="tree nodes besides the root, where a request does not say (default: the engine's)",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        help="how the budget follows load and acceptance, where a request does not say "
        f"(default: {default.policy})",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    default = ServeOptions()
    parser.add_argument(
        "--max-queue-size",
        type=integer(0),
        metavar="N",
        help="requests that may wait, 0 for any number; more are answered 429 "
        f"(default: {default.max_queue_size})",
    )
    parser.add_argument(
        "--max-body-mib",
        type=integer(1, 1024),
        metavar="N",
        help=f"largest request body in MiB (default: {default.max_body_mib})",
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        help="keep pages of finished requests for later ones that begin with the same tokens "
        "(default: yes)",
    )
    parser.add_argument(
        "--allow-unsafe-tree-state",
        action=argparse.BooleanOptionalAction,
        help="serve draft trees of engines whose recurrent state does not branch exactly; "
        "responses then say inexact_tree_state (default: no)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=integer(0, 86400),
        metavar="S",
        help=f"how long open requests may go on after SIGTERM (default: {default.drain_seconds})",
    )
    parser.add_argument(
        "--stall-seconds",
        type=integer(1, 86400),
        metavar="S",
        help="drop a client that sends nothing of its request, or takes nothing of its answer, "
        "for so long "
        f"(default: {default.stall_seconds})",
    )
    parser.add_argument(
        "--max-unread-mib",
        type=integer(1, 1024),
        metavar="N",
        help="end a stream whose client is this far behind, in MiB of output "
        f"(default: {default.max_unread_mib})",
    )
