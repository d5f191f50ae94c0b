"""Clients that stop reading or writing: they hold no page and no memory for long."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines import DEMO_PROMPTS
from server import ServerProcess

STALL_SECONDS = 1
# Megabytes of events: more than the sockets' buffers take.
LONG: dict[str, Any] = {
    "prompt": DEMO_PROMPTS[0],
    "max_tokens": 1900,
    "ignore_eos": True,
    "n": 64,
    "stream": True,
    "speculative": {"mode": "plain"},
}


@pytest.fixture(scope="module")
def hasty(demo_engine: Callable[..., Path]) -> Iterator[ServerProcess]:
    process = ServerProcess(demo_engine(), "--stall-seconds", STALL_SECONDS)
    yield process
    process.close()


@pytest.fixture(scope="module")
def patient(demo_engine: Callable[..., Path]) -> Iterator[ServerProcess]:
    """It waits for readers, but keeps little for them."""
    process = ServerProcess(demo_engine(), "--stall-seconds", 600, "--max-unread-mib", 1)
    yield process
    process.close()


def connect(server: ServerProcess) -> socket.socket:
    """With a small receive buffer."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)  # less than the server's patience, unless a test shortens that
    sock.connect((host, int(port)))
    return sock


def post(sock: socket.socket, body: dict[str, Any], *, sent: int | None = None) -> None:
    """A request, or the first ``sent`` bytes of its body."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content[:sent])


def rest(sock: socket.socket, pause: float = 0.0) -> bytes:
    """What comes until the server ends or drops the connection."""
    pieces = []
    try:
        while piece := sock.recv(2048):
            pieces.append(piece)
            time.sleep(pause)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def cancelled(server: ServerProcess) -> float:
    text = server.http.get("/metrics").text
    lines = [line for line in text.splitlines() if 'requests_total{outcome="cancelled"}' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_client_that_does_not_read_is_dropped(hasty: ServerProcess) -> None:
    before = psutil.Process(hasty.process.pid).num_fds()
    with connect(hasty) as sock:
        post(sock, LONG)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        assert hasty.used_pages() > 0
        assert hasty.idle(30), "its outputs go on"
        assert cancelled(hasty) > 0
        assert psutil.Process(hasty.process.pid).num_fds() <= before + 1  # metrics' own
        assert not rest(sock).endswith(b"data: [DONE]\n\n")


def test_a_slow_reader_gets_all_of_its_answer(hasty: ServerProcess) -> None:
    with connect(hasty) as sock:
        post(sock, LONG | {"n": 4, "max_tokens": 300})
        started = time.monotonic()
        answer = rest(sock, 0.03)
    assert time.monotonic() - started > 2 * STALL_SECONDS
    assert answer.count(b'"finish_reason":"length"') == 4
    assert b"data: [DONE]" in answer


@pytest.mark.parametrize("request_of", ["nothing", "half a head", "half a body"])
def test_a_client_that_does_not_send_is_dropped(hasty: ServerProcess, request_of: str) -> None:
    with connect(hasty) as sock:
        if request_of == "half a head":
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        elif request_of == "half a body":
            post(sock, {"prompt": "a"}, sent=5)
        answer = rest(sock)
    assert (b"408" in answer.split(b"\r\n")[0]) == (request_of == "half a body")


def test_an_unread_stream_is_bounded(patient: ServerProcess) -> None:
    """The engine does not wait for its reader; what is kept for it does not grow for ever."""
    with connect(patient) as sock:
        post(sock, LONG)
        first = sock.recv(1000)
        assert first.startswith(b"HTTP/1.1 200")
        assert patient.idle(60), "its outputs go on"
        assert cancelled(patient) > 0
        events = rest(sock).split(b"\n\n")
    errors = [event for event in events if b'"error"' in event]
    assert len(errors) == 1
    assert b"left too much of the stream unread" in errors[0]
    assert b"data: [DONE]" in events[-2]
