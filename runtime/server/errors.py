"""Errors as OpenAI's clients expect them: ``{"error": {message, type, param, code}}``."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trtree.runtime.chat_template import ChatTemplateError
from trtree.runtime.executor import QueueFullError
from trtree.runtime.service import ServiceUnavailableError
from trtree.runtime.session import RequestError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error")
    # A parameter's name is the client's; JSON can write what UTF-8 cannot.
    param = param and param.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """What an error of the layers below means to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ServiceUnavailableError):
        return ApiError(503, str(error))
    if isinstance(error, RequestError | ChatTemplateError):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says why")


def install(app: FastAPI) -> None:
    """Every error the app can answer, in one form."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _validation_error(error.errors()).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"{request.url.path} does not exist here"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    errors = (ApiError, QueueFullError, ServiceUnavailableError, RequestError, ChatTemplateError)
    for kind in (*errors, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first unknown parameter, or else the first error; unions report one per branch."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = (unknown or list(errors))[0]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error.get('ctx', {}).get('error', '')}")
    # "body", the parameter, and below it positions and branches of a union.
    where = [str(part) for part in error["loc"] if part != "body"]
    if not where and error["type"] == "string_unicode":
        return ApiError(400, "a parameter's name is not Unicode text")
    if not where:
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    param = where[0]
    if unknown:
        name = ".".join(part for part in where if not part.endswith("]"))
        return ApiError(400, f"unknown parameter {name!r}", param=param, code="unknown_parameter")
    same = [e for e in errors if e["loc"][:2] == error["loc"][:2]]
    reasons = list(dict.fromkeys(str(e["msg"]) for e in same))
    return ApiError(400, f"{param}: {'; or: '.join(reasons[:4])}", param=param)
