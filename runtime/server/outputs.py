"""From the service's threads to the event loop: a request's outputs as they come."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request

from trtree.runtime.service import Chunk, Finish, Handle, Service, Submission, TokenText


class Outputs:
    """The chunks of several submissions.

    Made in the event loop; ``submit`` may be called in any thread. The engine does not wait for
    a slow reader: once about ``max_unread_bytes`` of chunks wait, the submissions are cancelled
    and ``overrun`` is true.
    """

    def __init__(self, service: Service, max_unread_bytes: int) -> None:
        self.overrun = False
        self._service = service
        self._max_unread_bytes = max_unread_bytes
        self._unread_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._ready: list[tuple[int, Chunk]] = []
        self._wake = asyncio.Event()
        self._handles: list[Handle] = []
        self._cancelled = False

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Queue all of them, or none; raises what ``Service.submit`` raises."""
        try:
            for index, submission in enumerate(submissions):
                self._handles.append(self._service.submit(submission, partial(self._put, index)))
        except BaseException:
            self.cancel()
            raise
        if self._cancelled:  # meanwhile
            self.cancel()

    def cancel(self) -> None:
        """End what has not ended."""
        self._cancelled = True
        for handle in self._handles:
            handle.cancel()

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """Chunks with the index of their submission, as many as there are at a time."""
        left = len(self._handles)
        while left:
            await self._wake.wait()
            self._wake.clear()
            with self._lock:
                batch, self._ready = self._ready, []
                self._unread_bytes = 0
            left -= sum(chunk.finish is not None for _, chunk in batch)
            yield batch
            # A fast engine must not keep the loop from other connections, nor from
            # noticing that this one is gone.
            await asyncio.sleep(0)

    def _put(self, index: int, chunk: Chunk) -> None:
        with self._lock:
            asleep = not self._ready
            if not self.overrun or chunk.finish is not None:
                self._ready.append((index, chunk))
            self._unread_bytes += _bytes(chunk)
            overrun = self._unread_bytes > self._max_unread_bytes and not self.overrun
            self.overrun |= overrun
        if overrun:
            self.cancel()
        if asleep:
            self._loop.call_soon_threadsafe(self._wake.set)


def _bytes(chunk: Chunk) -> int:
    """About what a chunk takes in memory."""
    alternatives = sum(len(t.log_probs.top) for t in chunk.tokens if t.log_probs is not None)
    return 512 + 4 * len(chunk.text) + 256 * len(chunk.tokens) + 64 * alternatives


@dataclass
class Output:
    """One output, complete."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish: Finish | None = None


async def collect(request: Request, outputs: Outputs, count: int) -> list[Output] | None:
    """All outputs, complete; None if the client went away first."""
    gathering = asyncio.create_task(_gather(outputs, count))
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({gathering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return gathering.result() if gathering.done() else None
    finally:
        outputs.cancel()
        for task in (gathering, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _gather(outputs: Outputs, count: int) -> list[Output]:
    complete = [Output() for _ in range(count)]
    async for batch in outputs.batches():
        for index, chunk in batch:
            output = complete[index]
            output.text += chunk.text
            output.tokens += chunk.tokens
            output.finish = chunk.finish
    return complete


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
