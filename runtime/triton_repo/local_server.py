"""A tritonserver on this machine, from a virtual environment with ``nvidia-pytriton``.

That package carries the server with its python backend for machines without a GPU or a
container; see the ``triton-env`` target of the Makefile. On a GPU machine run NVIDIA's
container instead (docs/triton.md).
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 120


class LocalServer:
    """A server process on three free ports of 127.0.0.1; ready once this returns.

    Args:
        environment: the virtual environment.
        log: file that takes what the server prints.
        models: load only these (and allow more to be loaded later); default: all.

    Raises:
        RuntimeError: it ended, or was not ready in time; its log says why.
    """

    def __init__(
        self,
        environment: Path,
        repository: Path,
        log: Path,
        *,
        models: Sequence[str] | None = None,
        ready_seconds: float = START_SECONDS,
    ) -> None:
        self.environment = environment
        self.log = log
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(3)
        self.http_address = f"127.0.0.1:{self.http_port}"
        self.grpc_address = f"127.0.0.1:{self.grpc_port}"
        self.url = f"http://{self.http_address}"
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                self._command(repository, models),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._variables(),
            )
        self._wait(ready_seconds)

    def metrics(self) -> str:
        """Prometheus' text of all metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            return str(answer.read().decode())

    def stop(self, seconds: float = 60) -> int:
        """Let open requests end, then the server; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, repository: Path, models: Sequence[str] | None) -> list[str]:
        (server,) = self.environment.glob("lib/python3.*/site-packages/pytriton/tritonserver")
        control = ["--model-control-mode=explicit"] if models is not None else []
        return [
            str(server / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={server / 'backends'}",
            f"--cache-directory={server / 'caches'}",
            *("--http-address=127.0.0.1", f"--http-port={self.http_port}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}"),
            *("--allow-gpu-metrics=false", "--metrics-interval-ms=500"),
            *control,
            *(f"--load-model={name}" for name in models or ()),
        ]

    def _variables(self) -> dict[str, str]:
        """The python backend finds its environment through ``python3`` on PATH."""
        binaries = self.environment / "bin"
        libraries = subprocess.run(
            [
                str(binaries / "python3"),
                *("-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        return kept | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": libraries,
            "VIRTUAL_ENV": str(self.environment),
        }

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        status = self.stop(5)
        text = self.log.read_text(errors="replace")
        raise RuntimeError(f"tritonserver was not ready (status {status}):\n{text[-4000:]}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
