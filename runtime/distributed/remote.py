"""The executor of another replica: its leader runs it, rank 0 talks to it.

Calls are answered one at a time. Responses come without being asked for, as rounds run
whether or not anybody awaits them.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from trtree.runtime.distributed.world import sleeps, wait_for
from trtree.runtime.executor import (
    Executor,
    ExecutorStatistics,
    QueueFullError,
    Request,
    Response,
    RoundRecord,
)

_CALL, _REPLY, _RESPONSES = 1, 2, 3
_STOP = "stop"
_IDLE_WAIT = 0.05  # seconds an idle executor waits for a request, before it looks again
# Errors that a caller of an Executor tells apart; any other ends the replica's rank.
_ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "QueueFullError": QueueFullError,
    "RuntimeError": RuntimeError,
}


class RemoteExecutor:
    """An Executor's surface on rank 0, over the leader rank of another replica.

    Any thread may call any method, as with an Executor. Errors are the Executor's own:
    ValueError, QueueFullError, RuntimeError after shutdown.
    """

    def __init__(self, comm: Any, leader: int) -> None:
        self._comm = comm
        self._leader = leader
        self._calling = threading.Lock()  # a reply is to the last call
        self._receiving = threading.Lock()
        self._state = threading.Lock()  # guards what follows
        self._live: set[int] = set()
        self._ended_early: set[int] = set()  # finished before enqueue_request returned
        self._shut_down = False

    def enqueue_request(self, request: Request) -> int:
        request_id: int = self._call("enqueue_request", request)
        with self._state:
            if request_id in self._ended_early:
                self._ended_early.remove(request_id)
            else:
                self._live.add(request_id)
        return request_id

    def await_responses(self, timeout_seconds: float = 0.0) -> list[Response]:
        deadline = time.monotonic() + timeout_seconds
        with self._receiving:
            for seconds in sleeps():
                # Asked before looking: what is live now may be answered while we look.
                idle = self._idle()
                if responses := self._receive():
                    return responses
                if idle and (self._shut_down or time.monotonic() >= deadline):
                    break
                time.sleep(seconds)
        return []

    def cancel_request(self, request_id: int) -> None:
        self._call("cancel_request", request_id)

    def shutdown(self) -> None:
        self._call("shutdown")
        with self._state:
            self._shut_down = True

    def take_rounds(self) -> list[RoundRecord]:
        rounds: list[RoundRecord] = self._call("take_rounds")
        return rounds

    def latest_statistics(self) -> ExecutorStatistics:
        statistics: ExecutorStatistics = self._call("latest_statistics")
        return statistics

    def stop(self) -> None:
        """Let the replica's ranks go, after shutdown and once every response is there."""
        self._call(_STOP)

    def _call(self, method: str, *arguments: object) -> Any:
        with self._calling:
            self._comm.send((method, arguments), self._leader, _CALL)
            wait_for(lambda: self._comm.iprobe(self._leader, _REPLY))
            error, value = self._comm.recv(source=self._leader, tag=_REPLY)
        if error is not None:
            raise _ERRORS[error](value)
        return value

    def _receive(self) -> list[Response]:
        if not self._comm.iprobe(self._leader, _RESPONSES):
            return []
        responses: list[Response] = self._comm.recv(source=self._leader, tag=_RESPONSES)
        with self._state:
            for response in responses:
                if not response.finished:
                    continue
                if response.request_id in self._live:
                    self._live.remove(response.request_id)
                else:
                    self._ended_early.add(response.request_id)
        return responses

    def _idle(self) -> bool:
        with self._state:
            return not self._live


def serve_executor(comm: Any, executor: Executor) -> None:
    """On another replica's leader: run the executor for rank 0 until it says stop."""
    stopping = threading.Event()
    rounds = threading.Thread(target=_run_rounds, args=(comm, executor, stopping), name="rounds")
    rounds.start()
    while True:
        wait_for(lambda: comm.iprobe(0, _CALL))
        method, arguments = comm.recv(source=0, tag=_CALL)
        if method == _STOP:
            break
        comm.send(_answer(getattr(executor, method), arguments), 0, _REPLY)
        if method == "shutdown":
            stopping.set()
    stopping.set()
    rounds.join()
    comm.send((None, None), 0, _REPLY)


def _answer(method: Callable[..., object], arguments: tuple[object, ...]) -> tuple[Any, Any]:
    try:
        return None, method(*arguments)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def _run_rounds(comm: Any, executor: Executor, stopping: threading.Event) -> None:
    while True:
        if responses := executor.await_responses(_IDLE_WAIT):
            comm.send(responses, 0, _RESPONSES)
        elif stopping.is_set():
            return
