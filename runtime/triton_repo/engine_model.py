"""What Triton's models that own an engine have in common.

``execute`` returns at once: requests wait in the executor, which puts all of them into its
steps, and are answered from the service's thread through their response senders.
"""

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from trtree.build.engine_dir import EngineDirError
from trtree.runtime.service import Chunk, Handle, Service, Submission
from trtree.runtime.triton_repo.errors import send_error
from trtree.runtime.triton_repo.hosting import hosted
from trtree.runtime.triton_repo.inputs import Array, InputError
from trtree.runtime.triton_repo.metrics import Metrics
from trtree.runtime.triton_repo.orphans import end_with_server
from trtree.runtime.triton_repo.settings import EngineSettings, SettingsError, flag, parameters_of

# Prompts are tokenized beside Triton's thread, a few at a time.
PREPARING_THREADS = 4
_METRICS_SECONDS = 0.5
# Request parameters that Triton's own frontends set.
FRONTEND_PARAMETERS = ("triton_enable_empty_final_response", "binary_data_output")

_log = logging.getLogger(__name__)

Outputs = Mapping[str, Array]


class Answer(Protocol):
    """How one Triton request is answered."""

    submissions: Sequence[Submission]

    def take(self, index: int, chunk: Chunk) -> Outputs | None:
        """What a submission's next chunk adds to the answer: a response, or nothing yet.

        Never called again for a submission whose chunk had a ``finish``. The last chunk of
        the last submission must give a response.
        """


class EngineModel(ABC):
    """A model of the python backend that owns an engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine. Raises TritonModelException with one line that says what is wrong."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s: trtree: %(message)s")
        config = json.loads(args["model_config"])
        parameters = parameters_of(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        end_with_server()
        self._requests: dict[int, _LiveRequest] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._resources = ExitStack()
        try:
            self.settings = EngineSettings.from_parameters(parameters)
            self.exclude_input = flag(parameters, "exclude_input_in_output")
            folder = Path(args["model_repository"]) / self.settings.engine_dir
            engine = hosted(folder.resolve(), self.settings)
            self.service = Service(*self._resources.enter_context(engine))
        except (EngineDirError, SettingsError, RuntimeError, OSError) as error:
            self._resources.close()
            raise pb_utils.TritonModelException(" ".join(str(error).split())) from None
        self._resources.callback(self.service.close)
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="prepare")
        self._metrics = Metrics(self.service, args["model_name"], args["model_version"])
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    @abstractmethod
    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        """What a request asks for.

        Raises:
            InputError, RequestError: what cannot be served.
        """

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            try:
                self._begin(request)
            except Exception as error:  # one request must not end the others
                send_error(request.get_response_sender(), error)

    def finalize(self) -> None:
        """Triton calls this once no request is left."""
        self._preparing.shutdown()
        self._closing.set()
        self._watcher.join()
        self._resources.close()

    def _begin(self, request: Any) -> None:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        sender = request.get_response_sender()
        if "stop" in arrays and bool(arrays["stop"].any()):
            self._stop(request.request_id())
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(pb_utils.InferenceResponse([]), flags=final)
            return
        unknown = set(json.loads(request.parameters() or "{}")) - set(FRONTEND_PARAMETERS)
        if unknown:
            raise InputError(f"unknown parameter {', '.join(sorted(unknown))}")
        live = _LiveRequest(request, sender, self._forget)
        with self._lock:
            self._requests[id(live)] = live
        self._preparing.submit(live.start, self.service, lambda: self.answer(arrays))

    def _stop(self, request_id: str) -> None:
        """Cancel the requests of a client's own id."""
        if not request_id:
            raise InputError("stop needs the id of the request to stop")
        with self._lock:
            found = [one for one in self._requests.values() if one.request_id == request_id]
        for live in found:
            live.cancel()

    def _forget(self, live: "_LiveRequest") -> None:
        with self._lock:
            self._requests.pop(id(live), None)

    def _watch(self) -> None:
        """Cancel what nobody waits for any more, and keep the metrics fresh."""
        period = self.settings.cancellation_check_period_ms / 1000
        since = 0.0
        while not self._closing.wait(period):
            since += period
            try:
                with self._lock:
                    live = list(self._requests.values())
                for one in live:
                    one.cancel_if_left()
                if since >= _METRICS_SECONDS:
                    since = 0.0
                    self._metrics.update()
            except Exception:  # an engine that fails just now must not end the watch
                _log.exception("the model's watch goes on")


class _LiveRequest:
    """A Triton request and its submissions. Every path ends in one final response."""

    def __init__(
        self,
        request: Any,
        sender: Any,
        on_end: Callable[["_LiveRequest"], None],
    ) -> None:
        self.request_id = str(request.request_id())
        self._request = request
        self._sender = sender
        self._on_end = on_end
        self._streaming = False  # some response is sent
        self._handles: list[Handle] = []
        self._open = 0  # submissions that have not finished
        self._cancelled = False
        self._ended = False
        # Chunks come from the service's thread, while another may still submit or cancel.
        self._lock = threading.RLock()

    def start(self, service: Service, prepare: Callable[[], Answer]) -> None:
        """Queue what the request asks for; in a thread of its own."""
        try:
            answer = prepare()
            with self._lock:
                self._open = len(answer.submissions)
            for index, submission in enumerate(answer.submissions):
                with self._lock:
                    if self._ended:
                        return
                handle = service.submit(submission, partial(self._on_chunk, answer, index))
                with self._lock:
                    self._handles.append(handle)
                    left = self._cancelled or self._ended
                if left:
                    handle.cancel()
        except Exception as error:
            self._fail(error)

    def cancel_if_left(self) -> None:
        """Cancel if the client has gone or has cancelled."""
        # Under the lock: after its final response, Triton must not be asked about a request.
        with self._lock:
            if self._ended or self._cancelled or not self._request.is_cancelled():
                return
        self.cancel()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()

    def _on_chunk(self, answer: Answer, index: int, chunk: Chunk) -> None:
        with self._lock:
            if self._ended:
                return
            finish = chunk.finish
            if finish is not None and finish.reason == "error":
                self._fail(RuntimeError(finish.error))
                return
            try:
                outputs = answer.take(index, chunk)
                self._open -= finish is not None
                if outputs is not None:
                    self._send(outputs, final=not self._open)
            except Exception as error:
                self._fail(error)

    def _send(self, outputs: Outputs, *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        response = pb_utils.InferenceResponse(tensors)
        if not final:
            self._streaming = True
            self._sender.send(response)
            return
        self._end()
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._ended:
                return
            self._end()
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()
        send_error(self._sender, error, in_stream=self._streaming)

    def _end(self) -> None:
        self._ended = True
        self._on_end(self)
