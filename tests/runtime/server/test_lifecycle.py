"""Connections, queues and signals: nothing leaks, nothing hangs."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engines import DEMO_PROMPTS
from server import ROOT, ServerProcess
from trtree.runtime.server.command import main
from trtree.runtime.server.options import ServeOptions, read_serve_options

API_KEY = "sesame-7"
AUTHORIZED = {"Authorization": f"Bearer {API_KEY}"}
# More than any test waits for: a batch of outputs that go on to the engine's limit.
LONG: dict[str, Any] = {
    "prompt": DEMO_PROMPTS[0],
    "max_tokens": 1900,
    "ignore_eos": True,
    "n": 64,
    "speculative": {"mode": "plain"},
}


@pytest.fixture(scope="module")
def narrow(demo_engine: Callable[..., Path]) -> Iterator[ServerProcess]:
    """A server with a key, a queue for eight outputs and bodies of one MiB."""
    process = ServerProcess(
        demo_engine(),
        *("--max-queue-size", 8, "--max-body-mib", 1, "--drain-seconds", 60),
        environment={"TRTREE_API_KEY": API_KEY},
    )
    process.http.headers.update(AUTHORIZED)
    yield process
    process.close()


def test_the_start_says_how_to_use_it(server: ServerProcess, narrow: ServerProcess) -> None:
    """Its curl line works as it stands, and shows no key."""
    assert API_KEY not in narrow.greeting
    assert server.process.stdout is not None
    lines = [server.process.stdout.readline() for _ in range(2)]
    done = subprocess.run(
        ["sh", "-c", lines[1]], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_pages(server: ServerProcess, stream: bool) -> None:
    body = LONG | {"stream": stream}
    if stream:
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            assert server.used_pages() > 0
    else:
        patience = httpx.Timeout(60, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json=body, timeout=patience)
    assert server.idle(), "the outputs went on"


def test_a_stop_string_frees_pages(server: ServerProcess) -> None:
    (before,) = server.metrics("output_tokens_total")
    body = LONG | {"n": 1, "stop": "crow called"}
    assert server.complete(**body)["choices"][0]["finish_reason"] == "stop"
    assert server.idle()
    (after,) = server.metrics("output_tokens_total")
    assert after - before < 200, "the output went on behind its stop string"


def test_what_v1_asks_for(narrow: ServerProcess) -> None:
    with httpx.Client(base_url=narrow.url) as stranger:
        for headers in ({}, {"Authorization": "Bearer sesame-8"}, {"Authorization": API_KEY}):
            response = stranger.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert API_KEY not in response.text
        assert stranger.get("/v1/models").status_code == 401
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/metrics").status_code == 200
    assert narrow.http.get("/v1/models").status_code == 200


def test_bodies_too_large(narrow: ServerProcess) -> None:
    content = json.dumps({"prompt": "a" * (1 << 20)}).encode()

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        yield from (content[i : i + 10_000] for i in range(0, len(content), 10_000))

    for body in (content, pieces()):
        response = narrow.http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 413
        assert "this server takes 1048576" in response.json()["error"]["message"]
    assert narrow.complete(prompt="a", max_tokens=1)


def test_a_full_queue(narrow: ServerProcess) -> None:
    """429 for what does not fit, all of it or none; afterwards it fits again."""
    with narrow.http.stream("POST", "/v1/completions", json=LONG | {"n": 8, "stream": True}) as a:
        lines = a.iter_lines()  # kept: its end would be the connection's
        assert next(lines)
        response = narrow.http.post("/v1/completions", json={"prompt": "a", "n": 32})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
    assert narrow.idle()
    assert narrow.complete(prompt="a", max_tokens=1)


def test_sigterm_lets_an_open_stream_end(narrow: ServerProcess) -> None:
    """And what comes meanwhile is refused; the server exits 0. Ends the narrow server."""
    body = LONG | {"n": 8, "max_tokens": 1000, "stream": True}
    events: list[str] = []
    with narrow.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        events.append(next(lines))
        narrow.process.send_signal(signal.SIGTERM)
        assert narrow.shuts_down()
        with httpx.Client(base_url=narrow.url, headers=AUTHORIZED) as other:
            refused = other.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
        events += [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    reasons = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events[:-1]]
    assert [r["finish_reason"] for r in reasons if r["finish_reason"]] == ["length"] * 8
    assert narrow.process.wait(60) == 0
    assert narrow.process.stderr is not None
    assert narrow.process.stderr.read() == ""


def test_a_second_signal_ends_streams(demo_engine: Callable[..., Path]) -> None:
    process = ServerProcess(demo_engine())
    try:
        with process.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGINT)
            assert process.shuts_down()  # two signals at once may arrive as one
            process.process.send_signal(signal.SIGINT)
            *_, error, done = [line for line in lines if line]
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert process.process.wait(60) == 0
    finally:
        process.close()


def test_many_connections(server: ServerProcess) -> None:
    """Many at once, a third of which go away: all others are answered, nothing is left."""
    process = psutil.Process(server.process.pid)
    count, leaving = 160, 60
    before = process.num_fds()

    async def one(client: httpx.AsyncClient, index: int) -> int:
        body = {"prompt": f"Section {index}", "max_tokens": 12, "stream": bool(index % 2)}
        if index < leaving:
            body |= {"max_tokens": 1900, "ignore_eos": True}
            try:
                await client.post("/v1/completions", json=body, timeout=0.3)
            except httpx.TimeoutException:
                return 0
        return (await client.post("/v1/completions", json=body, timeout=120)).status_code

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(count)))

    statuses = asyncio.run(all_of_them())
    assert statuses[leaving:] == [200] * (count - leaving)
    assert server.idle()
    deadline = time.monotonic() + 60
    while process.num_fds() > before + 5:
        assert time.monotonic() < deadline, f"{process.num_fds()} files open, {before} before"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--engine", "nowhere"], "nowhere: no engine here"),
        (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--api-key-file", "nowhere"], "api_key_file nowhere: No such file"),
        (["--config", "nowhere"], "nowhere: No such file"),
        (["--tree-budget", "900"], "verify width of 901"),
        (["--tp", "2"], "built for 1 tensor-parallel ranks"),
    ],
)
def test_what_stops_the_start(
    demo_engine: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    part: str,
) -> None:
    assert main(["--engine", str(demo_engine()), "--port", "0", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert part in line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("port: high", "port 'high': expected int"),
        ("port: 70000", "port 70000 is not between 0 and 65535"),
        ("prefix_cache: 1", "prefix_cache 1: expected bool"),
        ("allow_unsafe_tree_state: yes please", "'yes please': expected bool"),
        ("mode: medusa", "'medusa' is none of plain, chain, tree"),
        ("ports: 1", "unknown option ports; known: engine, host"),
        ("[", "not YAML"),
        ("engine", "expected a mapping"),
    ],
)
def test_what_a_configuration_file_may_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, part: str
) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    assert main(["--config", str(tmp_path / "serve.yaml")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {tmp_path}/serve.yaml: ")
    assert part in line


def test_flags_override_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("engine: a/b\nport: 7\ndrain_seconds: 3\ntrace: t.jsonl\nmode: null\n")
    options = read_serve_options(file).with_overrides({"port": 8, "drain_seconds": None})
    assert options == ServeOptions(
        engine=Path("a/b"), port=8, drain_seconds=3, trace=Path("t.jsonl")
    )
    assert options.model == "b"
    # The file that comes with the server is what it does without one.
    assert read_serve_options(ROOT / "configs" / "serve.yaml") == ServeOptions()


def test_a_busy_port(server: ServerProcess, demo_engine: Callable[..., Path]) -> None:
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [ROOT / "runtime" / "serve.py", "--engine", str(demo_engine()), "--port", port],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},  # as mpirun starts it
    )
    assert done.returncode == 2
    assert (
        done.stderr == f"error: 127.0.0.1:{port}: Address already in use; choose another --port\n"
    )


def test_a_server_without_its_packages_says_what_to_install() -> None:
    """A plain install is without them."""
    script = ROOT / "runtime" / "serve.py"
    code = (
        "import runpy, sys; sys.modules['uvicorn'] = None; "
        f"sys.argv = ['serve.py']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "error: there is no uvicorn; pip install '.[serve]'\n"
