"""The HTTP application: OpenAI's endpoints over a Service."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from trtree.runtime.chat_template import ChatTemplate, ChatTemplateError
from trtree.runtime.server import errors
from trtree.runtime.server.errors import ApiError, error_body
from trtree.runtime.server.formats import ChatFormat, CompletionFormat, Format, usage_of
from trtree.runtime.server.guard import Guard
from trtree.runtime.server.metrics import Metrics
from trtree.runtime.server.outputs import Outputs, collect
from trtree.runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    ErrorResponse,
    GenerationRequest,
    Speculative,
)
from trtree.runtime.server.requests import chat_submissions, completion_submissions
from trtree.runtime.service import Finish, Service, Submission, Usage

# Prompts are rendered and tokenized beside the event loop, a few at a time.
PREPARING_THREADS = 4
# For the OpenAPI document.
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served"},
    "5XX": {"model": ErrorResponse, "description": "Shutting down, or the engine failed"},
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with stream its parts as events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


@dataclass(frozen=True)
class Settings:
    """How the app serves.

    Args:
        speculative: what requests that say nothing draft.
        api_key: what ``/v1`` asks for as a bearer token, if anything.
        max_unread_bytes: what a stream's client may leave unread, about, before the stream ends.
        stall_seconds: how long a client may take for the next part of a body.
        health: by rank, None or what is wrong; may block.
    """

    model: str
    speculative: Speculative = field(default_factory=Speculative)
    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    max_unread_bytes: int = 8 << 20
    stall_seconds: float = 60
    health: Callable[[], Mapping[int, str | None]] = lambda: {0: None}


class Api:
    """The endpoints' common ground."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service = service
        self.settings = settings
        self.preparing = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="prepare")
        self._template: ChatTemplate | ChatTemplateError
        try:
            self._template = ChatTemplate(service.engine_dir.tokenizer_path)
        except ChatTemplateError as error:
            self._template = error

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        self._check_model(body.model)
        answer = CompletionFormat(
            self.settings.model, self.service.tokenizer, log_probs=body.logprobs is not None
        )
        return await self._answer(
            request,
            body,
            answer,
            lambda: completion_submissions(self.service, body, self.settings.speculative),
        )

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        self._check_model(body.model)
        template = self._template
        if isinstance(template, ChatTemplateError):
            where = f"{self.service.engine_dir.tokenizer_path}: "  # not a client's business
            cause = str(template).removeprefix(where)
            raise ApiError(400, f"{cause} (/v1/completions)", param="messages")
        answer = ChatFormat(self.settings.model, self.service.tokenizer, log_probs=body.logprobs)
        return await self._answer(
            request,
            body,
            answer,
            lambda: chat_submissions(self.service, body, template, self.settings.speculative),
        )

    def model(self) -> dict[str, Any]:
        return {
            "id": self.settings.model,
            "object": "model",
            "created": int((self.service.engine_dir.path / "config.json").stat().st_mtime),
            "owned_by": "trtree",
            "max_model_len": self.service.max_seq_len,
        }

    async def health(self) -> Response:
        """Of every rank; 503 while draining."""
        loop = asyncio.get_running_loop()
        ranks = await loop.run_in_executor(None, self.settings.health)
        faults = [f"rank {rank}: {fault}" for rank, fault in ranks.items() if fault is not None]
        if self.service.failure is not None:
            faults.append(self.service.failure)
        if self.service.draining:
            faults.append("the server is shutting down")
        if faults:
            return JSONResponse(error_body(503, "; ".join(faults)), 503)
        return JSONResponse({"status": "ok", "ranks": len(ranks)})

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.settings.model:
            raise ApiError(
                404,
                f"model {model[:200]!r} is not served here; {self.settings.model!r} is",
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        answer: Format,
        prepare: Callable[[], list[Submission]],
    ) -> Response:
        outputs = Outputs(self.service, self.settings.max_unread_bytes)

        def submit() -> int:
            submissions = prepare()
            outputs.submit(submissions)
            return len(submissions)

        loop = asyncio.get_running_loop()
        try:
            count = await loop.run_in_executor(self.preparing, submit)
        except BaseException:
            outputs.cancel()
            raise
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(outputs, _events(outputs, answer, body.n, with_usage=with_usage))
        complete = await collect(request, outputs, count)
        if complete is None:
            return Response(status_code=499)  # nobody is there to read it
        finishes = [output.finish for output in complete if output.finish is not None]
        for finish in finishes:
            if (error := _failure(finish)) is not None:
                raise error
        usage = usage_of([finish.usage for finish in finishes], body.n)
        return JSONResponse(answer.whole(complete, usage))


class EventStream(StreamingResponse):
    """Server-sent events; ends the generation when the client has gone."""

    def __init__(self, outputs: Outputs, events: AsyncIterator[bytes]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the generator was never started
            self._outputs.cancel()


async def _events(
    outputs: Outputs, answer: Format, n: int, *, with_usage: bool
) -> AsyncIterator[bytes]:
    usages: dict[int, Usage] = {}
    error: ApiError | None = None
    async for batch in outputs.batches():
        events = []
        for index, chunk in batch:
            if chunk.finish is not None:
                usages[index] = chunk.finish.usage
                error = error or _too_slow(outputs) or _failure(chunk.finish)
            if error is None:
                events += [_event(part) for part in answer.parts(index, chunk)]
        if events:
            yield b"".join(events)
    if error is not None:
        yield _event(error.body())
    elif with_usage:
        usage = usage_of([usages[index] for index in sorted(usages)], n)
        yield _event(answer.usage_part(usage))
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _too_slow(outputs: Outputs) -> ApiError | None:
    if not outputs.overrun:
        return None
    return ApiError(408, "the request was cancelled: its client left too much of the stream unread")


def _failure(finish: Finish) -> ApiError | None:
    """An output that ended for no reason of its own."""
    if finish.reason == "error":
        return ApiError(500, finish.error or "the engine failed")
    if finish.reason == "cancelled":
        return ApiError(503, "the request was cancelled: the server is shutting down")
    return None


def create_app(service: Service, settings: Settings) -> FastAPI:
    """The application; the caller keeps the service's life."""
    api = Api(service, settings)
    metrics = Metrics(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        api.preparing.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="trtree",
        version=version("trtree"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=_ERRORS,
        redirect_slashes=False,
    )
    errors.install(app)
    app.add_middleware(
        Guard,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        stall_seconds=settings.stall_seconds,
        on_status=metrics.on_response,
    )

    post = partial(app.post, response_model=None, responses=_ANSWERS)
    post("/v1/completions")(api.completions)
    post("/v1/chat/completions")(api.chat)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [api.model()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        api._check_model(model)
        return api.model()

    app.get("/health", response_model=None)(api.health)

    @app.get("/version")
    async def version_() -> dict[str, str]:
        return {"version": app.version}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_() -> Response:
        # Beside the event loop: executors of other ranks are asked over MPI.
        text = await asyncio.get_running_loop().run_in_executor(None, metrics.render)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app
