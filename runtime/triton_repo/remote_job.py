"""The executors of a job of several ranks, for one process beside it.

Triton's process must not be a rank: it would take part in MPI's life and death. So mpirun's
rank 0 listens on a Unix socket of its user's, and Triton's model speaks to it. Messages are
pickled, as between ranks; whoever may open the socket may run code as its owner, hence
its permissions.
"""

import itertools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trtree.runtime.executor import (
    ExecutorLike,
    ExecutorStatistics,
    QueueFullError,
    Request,
    Response,
    RoundRecord,
)

_ROUND_SECONDS = 0.05  # an idle executor looks this often whether its client is gone
# Errors that a caller of an Executor tells apart.
_ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "QueueFullError": QueueFullError,
    "RuntimeError": RuntimeError,
}
_RESPONSES = -1  # in the place of a call's number


class JobClient:
    """The other end of ``serve``: one executor for each of the job's replicas.

    Raises:
        RuntimeError: the job ends before it is ready.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._ended = False
        try:
            count = connection.recv()
        except (EOFError, OSError):
            raise RuntimeError("the engine's job ended before it was ready") from None
        self.executors = [RemoteExecutor(self, index) for index in range(count)]
        self._reader = threading.Thread(target=self._read, name="job", daemon=True)
        self._reader.start()

    def call(self, executor: int, method: str, *arguments: object) -> Any:
        """Call a method of an executor there.

        Raises:
            RuntimeError: the job has ended; otherwise what the method raises.
        """
        future: Future[Any] = Future()
        with self._sending:
            if self._ended:
                raise RuntimeError("the engine's job has ended")
            number = next(self._numbers)
            self._calls[number] = future
            try:
                self._connection.send((number, executor, method, arguments))
            except OSError:
                self._calls.pop(number)
                raise RuntimeError("the engine's job has ended") from None
        return future.result()

    def close(self) -> None:
        """Let the job go; it ends what requests are left."""
        with self._sending:
            self._ended = True
            # Reading in another thread keeps close() from reaching the other side.
            with suppress(OSError):
                self._connection.send(None)
        self._reader.join(10)
        self._connection.close()

    def _read(self) -> None:
        try:
            while (message := self._connection.recv()) is not None:
                number, error, value = message
                if number == _RESPONSES:
                    self.executors[error].responses.put(value)
                    continue
                future = self._calls.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(_ERRORS[error](value))
        except (EOFError, OSError):
            pass
        with self._sending:
            self._ended = True
        for future in self._calls.values():
            future.set_exception(RuntimeError("the engine's job has ended"))
        for executor in self.executors:
            executor.responses.put(None)


class RemoteExecutor:
    """An Executor's surface over a job's connection; any thread may call any method."""

    def __init__(self, client: JobClient, index: int) -> None:
        self._client = client
        self._index = index
        self._shut_down = False
        # None: there will be no more.
        self.responses: queue.SimpleQueue[list[Response] | None] = queue.SimpleQueue()

    def enqueue_request(self, request: Request) -> int:
        return int(self._client.call(self._index, "enqueue_request", request))

    def await_responses(self, timeout_seconds: float = 0.0) -> list[Response]:
        try:
            responses = self.responses.get(timeout=timeout_seconds)
        except queue.Empty:
            return []
        if responses is None:
            self.responses.put(None)
            if self._shut_down:
                return []
            raise RuntimeError("its job has ended")
        return responses

    def cancel_request(self, request_id: int) -> None:
        self._client.call(self._index, "cancel_request", request_id)

    def shutdown(self) -> None:
        """End this client's requests; the executor itself is the job's."""
        self._shut_down = True
        with suppress(RuntimeError):
            self._client.call(self._index, "end_requests")

    def take_rounds(self) -> list[RoundRecord]:
        return list(self._client.call(self._index, "take_rounds"))

    def latest_statistics(self) -> ExecutorStatistics:
        statistics: ExecutorStatistics = self._client.call(self._index, "latest_statistics")
        return statistics


def serve(connection: Connection, executors: Sequence[ExecutorLike]) -> None:
    """On rank 0: do what one client asks, until it goes. Its requests end with it."""
    sending = threading.Lock()

    def send(message: object) -> None:
        with sending, suppress(OSError):  # a client that has gone is noticed by reading
            connection.send(message)

    send(len(executors))
    lanes = [_Lane(index, executor, send) for index, executor in enumerate(executors)]
    try:
        while (message := connection.recv()) is not None:
            number, index, method, arguments = message
            send((number, *lanes[index].call(method, arguments)))
    except (EOFError, OSError):
        pass
    finally:
        for lane in lanes:
            lane.close()
        send(None)


class _Lane:
    """One executor's rounds, for one client."""

    def __init__(self, index: int, executor: ExecutorLike, send: Any) -> None:
        self._index = index
        self._executor = executor
        self._send = send
        self._live: set[int] = set()
        self._lock = threading.Lock()  # held while a request is queued: its answers come after
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"executor{index}")
        self._thread.start()

    def call(self, method: str, arguments: tuple[Any, ...]) -> tuple[str | None, Any]:
        """The name of the error, if there is one, and the result or the error's text."""
        try:
            if method == "enqueue_request":
                return None, self._enqueue(*arguments)
            if method == "end_requests":
                self._end_requests()
                return None, None
            return None, getattr(self._executor, method)(*arguments)
        except (ValueError, RuntimeError) as error:
            name = type(error).__name__
            return name if name in _ERRORS else "RuntimeError", str(error)

    def close(self) -> None:
        self._end_requests()
        self._closing.set()
        self._thread.join()

    def _enqueue(self, request: Request) -> int:
        with self._lock:
            request_id = self._executor.enqueue_request(request)
            self._live.add(request_id)
        return request_id

    def _end_requests(self) -> None:
        with self._lock:
            live = list(self._live)
        for request_id in live:
            self._executor.cancel_request(request_id)

    def _run(self) -> None:
        while True:
            responses = self._executor.await_responses(_ROUND_SECONDS)
            with self._lock:
                self._live -= {one.request_id for one in responses if one.finished}
            if responses:
                self._send((_RESPONSES, self._index, responses))
            elif self._closing.is_set():
                return
