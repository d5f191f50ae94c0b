"""What stands before the application: the API key, size and pace of bodies, counts by status."""

import asyncio
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtree.runtime.server.errors import ApiError


class Guard:
    """ASGI middleware.

    Args:
        api_key: what paths under ``/v1`` need as a bearer token; None: nothing.
        stall_seconds: how long the next part of a body may take.
        on_status: told the status of every response.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        stall_seconds: float,
        on_status: Callable[[int], None],
    ) -> None:
        self._app = app
        self._api_key = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_body_bytes = max_body_bytes
        self._stall_seconds = stall_seconds
        self._on_status = on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_status(message["status"])
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refuse(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, counted)
        else:
            await self._app(scope, self._bounded(receive), counted)

    def _refuse(self, path: str, headers: Headers) -> ApiError | None:
        if self._api_key is not None and (path == "/v1" or path.startswith("/v1/")):
            given = headers.get("authorization", "").encode("latin-1", "replace")
            if not hmac.compare_digest(given, self._api_key):
                return ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return ApiError(413, self._too_large(length))
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Counts the bytes of bodies that do not tell their length, and waits for none for ever."""
        received = 0
        complete = False

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:  # what is left is the client's going, which may take its time
                return await receive()
            try:
                async with asyncio.timeout(self._stall_seconds):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"no more of the body came for {self._stall_seconds:g} seconds"
                ) from None
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large(f"over {self._max_body_bytes}"))
            return message

        return bounded

    def _too_large(self, size: str) -> str:
        return f"the body has {size} bytes; this server takes {self._max_body_bytes}"
