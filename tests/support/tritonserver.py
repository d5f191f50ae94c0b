"""A tritonserver for tests, and requests to its models."""

import json
import queue
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tritonclient.grpc as triton_grpc

from trtree.runtime.triton_repo.local_server import LocalServer

_TYPES = {"O": "BYTES", "b": "BOOL", "i": "INT32", "f": "FP32", "u": "UINT64"}
MODEL = "trtree"


class TritonServer(LocalServer):
    """With clients of its own. ``values`` of requests are inputs by name; lists are vectors."""

    def __init__(self, environment: Path, repository: Path, log: Path, **options: Any) -> None:
        self.repository = repository
        super().__init__(environment, repository, log, **options)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def generate(self, model: str = MODEL, **values: Any) -> dict[str, Any]:
        """``/generate``: the answer, or its error."""
        return self.http.post(f"/v2/models/{model}/generate", json=values).json()

    def generate_stream(self, model: str = MODEL, **values: Any) -> list[dict[str, Any]]:
        """``/generate_stream``: all events."""
        return list(self.events(model, **values))

    def events(self, model: str = MODEL, **values: Any) -> Iterator[dict[str, Any]]:
        """The same as they come; the client leaves where the iterator is closed."""
        path = f"/v2/models/{model}/generate_stream"
        with self.http.stream("POST", path, json=values) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def infer(self, model: str, *, batched: bool, **values: Any) -> dict[str, Any]:
        """``/infer``: outputs by name, or ``error``."""
        inputs = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": _TYPES[array.dtype.kind],
                "data": array.reshape(-1).tolist(),
            }
            for name, array in _arrays(values, batched).items()
        ]
        answer = self.http.post(f"/v2/models/{model}/infer", json={"inputs": inputs}).json()
        if "error" in answer:
            return answer
        return {output["name"]: output["data"] for output in answer["outputs"]}

    def load(self, model: str = MODEL) -> None:
        assert self.http.post(f"/v2/repository/models/{model}/load", json={}).status_code == 200

    def unload(self, model: str = MODEL) -> None:
        assert self.http.post(f"/v2/repository/models/{model}/unload").status_code == 200
        assert within(30, lambda: self._state(model) == "UNAVAILABLE")

    def metric(self, name: str, model: str = "") -> float:
        """The sum of a metric over its labels; of all models, unless one is named. A counter
        that has not counted yet is not shown."""
        label = f'model="{model}"' if model else ""
        found = re.findall(rf"^{name}{{.*{label}.*}} (\S+)$", self.metrics(), re.MULTILINE)
        assert found or name.endswith("_total"), f"no metric {name}"
        return sum(map(float, found))

    def idle(self) -> bool:
        """Whether requests and pages are gone soon."""
        names = ("requests_running", "requests_waiting")
        return within(60, lambda: not any(self.metric(f"trtree_{n}") for n in names)) and within(
            60, lambda: self.used_pages() == 0
        )

    def used_pages(self) -> float:
        names = ("kv_pages", "kv_pages_free", "kv_pages_cached")
        total, free, cached = (self.metric(f"trtree_{name}") for name in names)
        return total - free - cached

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, seconds: float = 60) -> int:
        with suppress(AttributeError):  # it did not start
            self.http.close()  # the server waits for open connections
        return super().stop(seconds)

    def _state(self, model: str) -> str:
        index = self.http.post("/v2/repository/index").json()
        return next((entry["state"] for entry in index if entry["name"] == model), "")


class GrpcStream:
    """A gRPC stream; responses come in a queue of the test's."""

    def __init__(self, server: TritonServer) -> None:
        self._client = triton_grpc.InferenceServerClient(server.grpc_address)
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(
        self, model: str = MODEL, *, batched: bool = False, request_id: str = "", **values: Any
    ) -> None:
        inputs = []
        for name, array in _arrays(values, batched).items():
            tensor = triton_grpc.InferInput(name, list(array.shape), _TYPES[array.dtype.kind])
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        self._client.async_stream_infer(
            model, inputs, request_id=request_id, enable_empty_final_response=True
        )

    def next(self) -> tuple[dict[str, Any], bool]:
        """A response's outputs, and whether it is the last. Raises its error."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        outputs = {o.name: result.as_numpy(o.name) for o in response.outputs}
        return outputs, response.parameters["triton_final_response"].bool_param

    def rest(self) -> list[dict[str, Any]]:
        """All responses up to the last."""
        found, last = [], False
        while not last:
            outputs, last = self.next()
            if outputs:
                found.append(outputs)
        return found

    def cancel(self) -> None:
        """Cancel what is open, and close."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def text_of(responses: list[dict[str, Any]]) -> str:
    """The pieces of a stream, put together."""
    pieces = [response["text_output"] for response in responses]
    return "".join(
        piece if isinstance(piece, str) else piece.reshape(-1)[0].decode() for piece in pieces
    )


def within(seconds: float, condition: Any) -> bool:
    """Whether it comes true in this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _arrays(values: dict[str, Any], batched: bool) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
            continue
        items = value if isinstance(value, list) else [value]
        kind: Any = {str: np.object_, bool: np.bool_, int: np.int32, float: np.float32}
        array = np.array(items, dtype=kind[type(items[0])])
        arrays[name] = array[None] if batched else array
    return arrays
