"""Beside asgi-correlation-id and OpenTelemetry, inside and outside of them: one id, one trace."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import httpx
import pytest
from asgi_correlation_id import CorrelationIdMiddleware, correlation_id
from conftest import Records, serving
from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tracer_marks.fastapi import TracerMiddleware, current, install

log = logging.getLogger("app")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def application() -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def root() -> dict[str, Any]:
        request = current()
        assert request is not None
        log.info("here")
        return {"ours": request.request_id, "theirs": correlation_id.get(), "out": request.headers()}

    return app


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("given", [None, uuid.uuid4().hex, "no-uuid", "a b"], ids=["none", "uuid", "no uuid", "bad"])
def test_correlation_id(outside: bool, given: str | None) -> None:
    app = application()
    if outside:
        app.add_middleware(CorrelationIdMiddleware)
        install(app)
    else:
        app.add_middleware(TracerMiddleware)
        app.add_middleware(CorrelationIdMiddleware)
    headers = {} if given is None else {"X-Request-ID": given}
    with serving(app) as url:
        answer = httpx.get(url, headers=headers)
        said = answer.json()
        ids = answer.headers.get_list("x-request-id")
        assert ids == [said["ours"]]
        # Of what is no UUID it makes one of its own, unless told to validate otherwise: outside of us we follow it.
        if given != "no-uuid" or not outside:
            assert said["ours"] == said["theirs"]
        assert given not in (None, "a b") or len(said["ours"]) == 32


@pytest.mark.parametrize("order", ["ours later", "theirs later", "ours inside"])
@pytest.mark.parametrize("given", [True, False], ids=["trace given", "no trace"])
def test_opentelemetry(records: Records, order: str, given: bool) -> None:
    # Not the process's provider: that would have FastAPI trace the applications of all other tests.
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app = application()
    match order:
        case "ours later":
            FastAPIInstrumentor.instrument_app(app, tracer_provider=provider)
            install(app)
        case "theirs later":
            install(app)
            FastAPIInstrumentor.instrument_app(app, tracer_provider=provider)
        case _:
            app.add_middleware(TracerMiddleware)
            FastAPIInstrumentor.instrument_app(app, tracer_provider=provider)
    with serving(app) as url:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"} if given else {}
        said = httpx.get(url, headers=headers).json()
    server = [span for span in spans.get_finished_spans() if span.kind == trace.SpanKind.SERVER]
    assert len(server) == 1
    trace_id, span_id = f"{server[0].context.trace_id:032x}", f"{server[0].context.span_id:016x}"
    assert not given or trace_id == TRACE
    record = records.saying("here")[0]
    assert (record.trace_id, record.span_id, record.trace_flags[0]) == (trace_id, span_id, "0")
    assert said["out"]["traceparent"].startswith(f"00-{trace_id}-{span_id}-")
