"""The soak, for a second: that it runs, and that it notices what it is there for."""

import asyncio
import time

import pytest

from server import ServerProcess
from trtree.runtime.bench import soak
from trtree.runtime.bench.serve import MODES
from trtree.runtime.bench.soak import Soak

PROMPTS = ["Tell a story:", "Write this order as JSON"]


def test_answers_repeat_and_nothing_is_left(server: ServerProcess) -> None:
    async def load() -> tuple[list[str], dict[str, float]]:
        async with Soak(server.url, PROMPTS, 6, 0) as clients:
            modes = await clients.find_modes()
            for _ in range(2):
                await clients.load(1)
                await clients.wait_until_empty()
            return modes, clients.figures()

    modes, figures = asyncio.run(load())
    assert modes == list(MODES)
    answered = figures["answered_greedy"] + figures["answered_sampled"]
    assert answered > figures["different_requests"]  # some were repeated
    assert server.idle(0.5)


def test_another_answer_is_noticed(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: answers of a server that forgets the seed."""
    whole = Soak._whole

    async def unseeded(self: Soak, body: dict[str, object]) -> list[str]:
        body = {**body, "seed": None, "temperature": 1.0, "max_tokens": 64, "ignore_eos": True}
        return await whole(self, body)

    async def load() -> None:
        async with Soak(server.url, PROMPTS, 6, 0) as clients:
            await clients.find_modes()
            await clients.load(20)

    monkeypatch.setattr(Soak, "_whole", unseeded)
    with pytest.raises(RuntimeError, match="before"):
        asyncio.run(load())


def test_what_stays_in_use_is_noticed(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "temperature": 1, "n": 128}
    monkeypatch.setattr(soak, "IDLE_SECONDS", 0)

    async def look() -> None:
        async with Soak(server.url, PROMPTS, 1, 0) as clients:
            await clients.wait_until_empty()

    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: its end would be the connection's
        assert next(lines)
        while server.used_pages() == 0:  # until the first rounds are counted
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="kv_pages_used"):
            asyncio.run(look())
    assert server.idle()
