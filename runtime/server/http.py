"""Runs the application until SIGTERM or SIGINT, then lets open requests end."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from trtree.runtime.service import Service

BACKLOG = 2048
# Longer than proxies keep idle connections, so that none is closed while it is being reused.
_KEEP_ALIVE_SECONDS = 75
_CLOSING_SECONDS = 5  # for what is left of a response after its request was cancelled
_TICK_SECONDS = 0.05
# What the system keeps of an answer for a slow reader; by itself it would keep megabytes.
_SEND_BUFFER_BYTES = 256 << 10
# A peer that died without a word is noticed after idle + count * interval seconds.
_KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class AddressError(ValueError):
    """An address the server cannot have; names it."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        AddressError: no such address, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise AddressError(f"host {host!r}: {getattr(error, 'strerror', error)}") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise AddressError(f"{host}:{port}: {error.strerror}; choose another --port") from None
    return sock


def url(sock: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Any,
    service: Service,
    sock: socket.socket,
    *,
    drain_seconds: float,
    stall_seconds: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal, then take no more requests, give those there are
    ``drain_seconds`` to end, and return. A second signal ends them at once.

    A connection is dropped whose client sends no request, or takes nothing of what waits for
    it, for ``stall_seconds``; its request ends as if the client had gone."""
    _limit(sock, stall_seconds)
    config = _Config(
        app,
        stall_seconds,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
        server_header=False,
    )
    server = _Server(config, service, drain_seconds, on_ready)
    # uvicorn raises the signals it got again when it has shut down.
    handlers = {sig: signal.signal(sig, _nothing) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[sock])
    finally:
        for sig, handler in handlers.items():
            signal.signal(sig, handler)


def _limit(sock: socket.socket, stall_seconds: float) -> None:
    """What the system does for connections, which inherit it from the socket they come by."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = _KEEP_ALIVE_PROBES | {"TCP_USER_TIMEOUT": round(1000 * stall_seconds)}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Config(uvicorn.Config):
    def __init__(self, app: Any, stall_seconds: float, **options: Any) -> None:
        super().__init__(app, **options)
        self._stall_seconds = stall_seconds

    def load(self) -> None:
        super().load()
        self.http_protocol_class = _patient(self.http_protocol_class, self._stall_seconds)


def _patient(protocol: type[Any], stall_seconds: float) -> type[asyncio.Protocol]:
    """A protocol that drops connections on which nothing moves."""

    class Patient(protocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start(stall_seconds, lambda: self.cycle is None)

        def pause_writing(self) -> None:
            """More waits for the client than is kept in memory."""
            super().pause_writing()
            self._start(stall_seconds, lambda: True)

        def resume_writing(self) -> None:
            self._stop()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _start(self, seconds: float, stalled: Callable[[], bool]) -> None:
            def look() -> None:
                if stalled():
                    self.transport.abort()  # close() would wait for what is not taken

            self._stop()
            self._timer = asyncio.get_running_loop().call_later(seconds, look)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()

    return Patient


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_seconds: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._deadline = now if self._deadline is not None else now + self._drain_seconds
        self._service.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def main_loop(self) -> None:
        draining = asyncio.create_task(self._drain())
        try:
            await super().main_loop()
        finally:
            draining.cancel()
            with suppress(asyncio.CancelledError):
                await draining

    async def _drain(self) -> None:
        while self._deadline is None or (
            self._service.open_requests and time.monotonic() < self._deadline
        ):
            await asyncio.sleep(_TICK_SECONDS)
        self._service.cancel_all()
        self.should_exit = True


def _nothing(*_: object) -> None:
    pass
