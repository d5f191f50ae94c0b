"""The server in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60


class ServerProcess:
    """``runtime/serve.py`` on a free port. ``http`` is a client of it.

    ``launcher`` starts it, as ``("mpirun", "-n", "2")`` does.
    """

    def __init__(
        self,
        engine: Path,
        *arguments: object,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
    ):
        self.process = subprocess.Popen(
            [
                *launcher,
                sys.executable,
                str(ROOT / "runtime" / "serve.py"),
                *("--engine", str(engine), "--port", "0", "--threads", "1"),
                *map(str, arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.greeting)
        if found is None:
            self.process.wait(START_SECONDS)
            assert self.process.stderr is not None
            raise AssertionError(f"the server did not start: {self.process.stderr.read()}")
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def metrics(self, *names: str) -> list[float]:
        """Of one scrape, each metric summed over its labels."""
        text = self.http.get("/metrics").text
        sums = []
        for name in names:
            values = re.findall(rf"^trtree_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            assert values, f"no metric {name}"
            sums.append(sum(map(float, values)))
        return sums

    def used_pages(self) -> float:
        total, free, cached = self.metrics("kv_pages", "kv_pages_free", "kv_pages_cached")
        return total - free - cached

    def processor_seconds(self) -> float:
        """What the server has used of them, however busy the machine is."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def idle(self, seconds: float = 30) -> bool:
        """Whether requests and pages are gone within this time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if sum(self.metrics("requests_running", "requests_waiting")) + self.used_pages() == 0:
                return True
            time.sleep(0.05)
        return False

    def shuts_down(self) -> bool:
        """Whether ``/health`` comes to say so, while it still answers."""
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while (health := client.get("/health")).status_code == 200:
                time.sleep(0.01)
            return (
                health.status_code == 503 and "shutting down" in health.json()["error"]["message"]
            )

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.http.close()
        self.process.send_signal(sig)
        return self.process.wait(60)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
