"""``tensorrt_llm_bls``: preprocessing, engine and text in one model.

It keeps each output's text state between responses, so that streamed pieces add up to the
whole text, and can send the whole text so far each time (``accumulate_tokens``).
"""

import json
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtree.runtime.session import RequestError
from trtree.runtime.tokenizer import TextStream
from trtree.runtime.triton_repo.answers import texts
from trtree.runtime.triton_repo.errors import Cancelled, send_error
from trtree.runtime.triton_repo.inflight_batcher import (
    PASSED_ON,
    PREPROCESSED,
    PREPROCESSING_INPUTS,
    TEXT_OUTPUTS,
    TOKEN_OUTPUTS,
)
from trtree.runtime.triton_repo.inputs import Array
from trtree.runtime.triton_repo.settings import SettingsError, flag, parameters_of
from trtree.runtime.triton_repo.text_models import EngineText

# A request waits in a thread for the engine's answers.
MOST_REQUESTS = 256
_CHECK_SECONDS = 0.1


class BlsModel:
    """A model that calls others of the repository."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = parameters_of(args["model_config"])
        policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
        self._decoupled = bool(policy.get("decoupled"))
        try:
            self._accumulate = flag(parameters, "accumulate_tokens")
        except SettingsError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._engine = parameters["tensorrt_llm_model_name"]
        self._text = EngineText(args)
        self._threads = ThreadPoolExecutor(MOST_REQUESTS, thread_name_prefix="request")
        self._live: dict[str, Any] = {}  # Triton's requests by the ids they have below
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._threads.submit(self._run, request)

    def finalize(self) -> None:
        self._threads.shutdown()
        self._closing.set()
        self._watcher.join()

    def _run(self, request: Any) -> None:
        sender = request.get_response_sender()
        request_id = uuid.uuid4().hex
        try:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            with self._lock:
                self._live[request_id] = request
            last = None
            for outputs in self._generate(arrays, request_id):
                if last is not None:
                    sender.send(last)
                tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
                last = pb_utils.InferenceResponse(tensors)
            if last is None:
                raise RuntimeError(f"{self._engine} ended without an answer")
            sender.send(last, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # one request must not end the others
            send_error(sender, error)
        finally:
            with self._lock:
                self._live.pop(request_id, None)

    def _generate(self, arrays: Mapping[str, Array], request_id: str) -> Iterator[dict[str, Array]]:
        sources = {name: arrays[own] for name, own in PREPROCESSING_INPUTS.items() if own in arrays}
        (prepared,) = _call("preprocessing", sources, list(PREPROCESSED), request_id, False)
        inputs = {name: prepared[source] for source, name in PREPROCESSED.items()}
        inputs |= {name: arrays[own] for name, own in PASSED_ON.items() if own in arrays}
        names = [tensor.name for tensor in TOKEN_OUTPUTS]
        streams: dict[int, _Text] = {}
        for outputs in _call(self._engine, inputs, names, request_id, self._decoupled):
            index = int(outputs["sequence_index"].reshape(-1)[0])
            text = streams.setdefault(index, _Text(self._text.tokenizer.stream()))
            length = int(outputs["sequence_length"].reshape(-1)[0])
            piece = text.push(outputs["output_ids"].reshape(-1)[:length].tolist())
            shown = text.whole if self._accumulate else piece
            yield {
                tensor.name: outputs[tensor.name]
                for tensor in TEXT_OUTPUTS
                if tensor.name in outputs
            } | {"text_output": texts([shown])[None]}

    def _watch(self) -> None:
        """Stop below what nobody waits for above."""
        while not self._closing.wait(_CHECK_SECONDS):
            with self._lock:
                live = list(self._live.items())
            for request_id, request in live:
                if request.is_cancelled():
                    with self._lock:
                        self._live.pop(request_id, None)
                    self._threads.submit(self._stop, request_id)

    def _stop(self, request_id: str) -> None:
        stop = {"stop": np.array([[True]])}
        for _ in _call(self._engine, stop, [], request_id, self._decoupled):
            pass


def _call(
    model: str, inputs: Mapping[str, Array], names: list[str], request_id: str, decoupled: bool
) -> Iterator[dict[str, Array]]:
    """Another model's responses, by output.

    Raises:
        Cancelled: the request was. RequestError: the other model's own error.
    """
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=names,
    )
    responses = request.exec(decoupled=True) if decoupled else [request.exec()]
    for response in responses:
        if response.has_error():
            error = response.error()
            if error.code() == pb_utils.TritonError.CANCELLED:
                raise Cancelled(error.message())
            raise RequestError(error.message())
        if tensors := response.output_tensors():
            yield {tensor.name(): tensor.as_numpy() for tensor in tensors}


class _Text:
    """One output's text so far."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self.whole = ""

    def push(self, token_ids: list[int]) -> str:
        """Add a response's tokens, which never end inside a character but at the very end."""
        piece = self._stream.push(token_ids) + self._stream.finish()
        self.whole += piece
        return piece
