"""Request ids, trace context and marks for FastAPI, Starlette and every other ASGI application.

    from fastapi import FastAPI
    from tracer_marks.fastapi import describe, install, token

    app = FastAPI()
    install(app, model="llama", model_version="3.1")

    @app.post("/v1/completions")
    async def completions(body: Completion):
        describe(tenant_id=body.user, prompt_tokens=count(body.prompt))
        async def stream():
            async for text in generate(body):
                token()
                yield text
        return StreamingResponse(stream())

A request's begin and end are marked by themselves. Its finish reason is `STOP`; `ERROR` where the answer's status is
400 or above, the application raised, or the answer is not complete; `CANCELLED` where the client went away while it was
waited for (a server notices that when it streams, or when the application asks); or what `finish` says.

Nothing here imports FastAPI, and nothing is buffered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from . import FinishReason
from .context import (
    ContextThreadPoolExecutor,
    Request,
    TraceContext,
    current,
    current_request,
    is_valid_request_id,
    new_request_id,
)

__all__ = [
    "ContextThreadPoolExecutor",
    "Request",
    "TracerMiddleware",
    "current",
    "describe",
    "finish",
    "from_header",
    "install",
    "token",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Key of the request in the scope: marks that it has been taken in.
_SCOPE_KEY = "tracer_marks.request"


def describe(**facts: Any) -> None:
    """Tells what has become known of the current request (`Request.describe`); outside of one it does nothing."""
    if (request := current()) is not None:
        request.describe(**facts)


def token(choice: int = 0) -> None:
    """Marks that the next token of the current request is handed to its client now; outside of one it does nothing."""
    if (request := current()) is not None:
        request.token(choice)


def finish(reason: FinishReason) -> None:
    """Tells why the current request ends, where its status does not; outside of one it does nothing."""
    if (request := current()) is not None and not request.ended:
        request.finish_reason = FinishReason(reason)


def from_header(name: str) -> Callable[[Scope], str | None]:
    """For `tenant_id`: takes it from a header that a trusted gateway sets."""
    wanted = name.lower().encode("latin-1")

    def read(scope: Scope) -> str | None:
        text = _header(scope["headers"], wanted)
        return text if text is not None and is_valid_request_id(text) else None

    return read


def install(app: Any, **options: Any) -> None:
    """Puts `TracerMiddleware` around a FastAPI or Starlette application, outside of all its middleware.

    There, unlike with `app.add_middleware`, it also sees the answers to unhandled exceptions. The application object
    stays the same and of its class, so that whatever else instruments it may do so before or after.
    """
    inner = type(app)
    middleware = TracerMiddleware(lambda *exchange: inner.__call__(app, *exchange), **options)

    async def call(_: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await middleware(scope, receive, send)

    app.__class__ = type(inner.__name__, (inner,), {"__call__": call, "__module__": inner.__module__})


class TracerMiddleware:
    """ASGI middleware that takes requests in, keeps their context while they are served, and marks their begin and end.

    request_id_header: takes the request's id from here, makes one where it is missing or invalid (other characters than
        letters, digits and `._:/+=@~-`, or more than 128), shows it to the application there, and echoes it.
    tenant_id: tells the tenant of a request from its ASGI scope, where that is known so early.
    model, model_version, engine_hash, kv_cache_strategy: of all requests, unless `describe` says otherwise.
    """

    def __init__(
        self,
        app: App,
        *,
        request_id_header: str = "X-Request-ID",
        tenant_id: Callable[[Scope], str | None] | None = None,
        model: str | None = None,
        model_version: str | None = None,
        engine_hash: str | None = None,
        kv_cache_strategy: str | None = None,
    ) -> None:
        self.app = app
        self._id_header = request_id_header.lower().encode("latin-1")
        self._tenant_id = tenant_id
        self._served: dict[str, Any] = {
            "model": model,
            "model_version": model_version,
            "engine_hash": engine_hash,
            "kv_cache_strategy": kv_cache_strategy,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _SCOPE_KEY in scope:
            await self.app(scope, receive, send)
            return
        received_ns = time.monotonic_ns()
        request, scope, echoes = self._take_in(scope)
        exchange = _Exchange(request, receive, send, self._id_header if echoes else None)
        reset = current_request.set(request)
        try:
            request.begin(received_ns)
            await self.app(scope, exchange.receive, exchange.send)
            exchange.end()
        except Exception:
            request.end(FinishReason.CANCELLED if exchange.disconnected else FinishReason.ERROR)
            raise
        except BaseException:
            # The task is cancelled, in the manner of whatever event loop this is.
            request.end(FinishReason.CANCELLED)
            raise
        finally:
            current_request.reset(reset)

    def _take_in(self, scope: Scope) -> tuple[Request, Scope, bool]:
        """The request, what the application shall see of it, and whether its id is ours to echo."""
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        given_id = _header(headers, self._id_header)
        correlation_id = _correlation_id()
        request_id = correlation_id if given_id is None else given_id
        if request_id is None or not is_valid_request_id(request_id):
            request_id = new_request_id()
        active = TraceContext.active()
        parent = TraceContext.parse(
            _header(headers, b"traceparent") or "", _header(headers, b"tracestate") or ""
        )
        trace = active or (parent.child() if parent else TraceContext.new())
        shown = {self._id_header: request_id}
        if active is None:
            # What traces inside of us continues our trace.
            shown |= {b"traceparent": trace.traceparent, b"tracestate": trace.tracestate}
        kept = [(name, value) for name, value in headers if name.lower() not in shown]
        kept += [(name, text.encode("latin-1")) for name, text in shown.items() if text]
        request = Request(request_id, trace, **self._served)
        if self._tenant_id is not None:
            request.tenant_id = self._tenant_id(scope)
        # asgi-correlation-id around us echoes the id itself.
        echoes = correlation_id is None or correlation_id != given_id
        return request, {**scope, "headers": kept, _SCOPE_KEY: request}, echoes


class _Exchange:
    """What passes between server and application for one request."""

    __slots__ = ("_echo", "_receive", "_send", "complete", "disconnected", "request", "status")

    def __init__(self, request: Request, receive: Receive, send: Send, echo: bytes | None) -> None:
        self.request = request
        self._receive = receive
        self._send = send
        self._echo = echo
        self.status = 0
        self.complete = False
        self.disconnected = False

    async def receive(self) -> Message:
        message = await self._receive()
        # After the answer servers say so, too.
        if message["type"] == "http.disconnect" and not self.complete:
            self.disconnected = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._echo is not None:
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != self._echo]
                headers.append((self._echo, self.request.request_id.encode("latin-1")))
                message = {**message, "headers": headers}
        try:
            await self._send(message)
        except OSError:
            self.disconnected = True
            raise
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            self.end()

    def end(self) -> None:
        """The answer is complete, or the application is done."""
        if self.complete:
            self.request.end(FinishReason.STOP if self.status < 400 else FinishReason.ERROR)
        else:
            self.request.end(FinishReason.CANCELLED if self.disconnected else FinishReason.ERROR)


def _header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str | None:
    """The first header of this name (lower case)."""
    for name, value in headers:
        if name.lower() == wanted:
            return value.decode("latin-1").strip()
    return None


def _correlation_id() -> str | None:
    """What asgi-correlation-id around us, if there is one, has named the request."""
    module = sys.modules.get("asgi_correlation_id.context")
    return module.correlation_id.get() if module is not None else None
