"""Real FastAPI on a real uvicorn: ids, context and marks under concurrency, streaming, cancellation, exceptions."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from conftest import Marks, Records, serving
from fastapi import BackgroundTasks, FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import StreamingResponse

from tracer_marks import FinishReason
from tracer_marks.context import is_valid_request_id
from tracer_marks.fastapi import (
    ContextThreadPoolExecutor,
    TracerMiddleware,
    current,
    describe,
    finish,
    from_header,
    install,
    token,
)

log = logging.getLogger("app")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def here() -> str | None:
    request = current()
    return request.request_id if request else None


def application() -> FastAPI:
    app = FastAPI()

    @app.get("/id")
    async def id_(request: Request) -> dict[str, Any]:
        served = current()
        assert served is not None
        seen = {name: request.headers.getlist(name) for name in ["x-request-id", "traceparent", "tracestate"]}
        return {"here": here(), "trace": served.trace._asdict(), "seen": seen, "out": served.headers()}

    @app.get("/sync")
    def sync() -> dict[str, Any]:
        return {"here": here()}

    @app.get("/everywhere")
    async def everywhere(background: BackgroundTasks) -> dict[str, Any]:
        async def later() -> str | None:
            await asyncio.sleep(random.random() / 100)
            log.info("background %s", here())
            return here()

        background.add_task(later)
        background.add_task(lambda: log.info("background %s", here()))
        loop = asyncio.get_running_loop()
        with ContextThreadPoolExecutor() as pool:
            places = [
                await asyncio.to_thread(here),
                await loop.run_in_executor(pool, here),
                await asyncio.create_task(later()),
                *await asyncio.gather(later(), later()),
                here(),
            ]
        return {"places": places}

    @app.get("/stream/{count}")
    async def stream(count: int, fails_at: int = -1, pause: float = 0.0) -> StreamingResponse:
        async def tokens() -> AsyncIterator[str]:
            try:
                for i in range(count):
                    await asyncio.sleep(pause * random.random())
                    if i == fails_at:
                        raise RuntimeError("planted")
                    token()
                    log.info("token %d of %s", i, here())
                    yield f"{here()} "
            finally:
                log.info("closed %s", here())

        describe(prompt_tokens=count, prompt_length=3 * count, batch_size=4, model_version="2")
        return StreamingResponse(tokens())

    @app.get("/sync_stream/{count}")
    def sync_stream(count: int) -> StreamingResponse:
        def tokens() -> Iterator[str]:
            for i in range(count):
                token()
                log.info("token %d of %s", i, here())
                yield f"{here()} "

        return StreamingResponse(tokens())

    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError("planted")

    @app.get("/missing")
    async def missing() -> None:
        raise HTTPException(404)

    @app.get("/length")
    async def length() -> dict[str, Any]:
        finish(FinishReason.LENGTH)
        return {}

    @app.websocket("/socket")
    async def websocket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(str(here()))
        await socket.close()

    return app


@pytest.fixture(params=["asyncio", "uvloop"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    app = application()
    install(app, model="llama", tenant_id=from_header("x-tenant"))
    http = "h11" if request.param == "asyncio" else "httptools"
    with serving(app, loop=request.param, http=http) as address:
        yield address


def test_ids_are_taken_and_echoed(url: str) -> None:
    answer = httpx.get(f"{url}/id", headers={"X-Request-ID": "req-1"})
    assert answer.headers.get_list("x-request-id") == ["req-1"]
    assert answer.json()["here"] == "req-1"
    assert answer.json()["seen"]["x-request-id"] == ["req-1"]


def test_ids_are_made(url: str) -> None:
    ids = {httpx.get(f"{url}/sync").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and all(len(id_) == 32 and is_valid_request_id(id_) for id_ in ids)


def raw(url: str, head: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /id HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + head + b"\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    "hostile",
    [b"", b"a b", b"x" * 129, b"<script>", b'a"b', b"\xc3\xa9", b"\xff\xfe", b"${jndi:ldap://x}", b"a;b", b"x" * 8000],
)
def test_hostile_ids_are_replaced(url: str, hostile: bytes) -> None:
    answer = raw(url, b"X-Request-ID: " + hostile)
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200"), head
    ids = [line.split(b": ")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
    assert len(ids) == 1 and len(ids[0]) == 32, ids
    assert not hostile or hostile not in answer


def test_trace_context_comes_in_and_goes_out(url: str) -> None:
    given = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    answer = httpx.get(f"{url}/id", headers=given).json()
    trace = answer["trace"]
    assert (trace["trace_id"], trace["trace_flags"], trace["tracestate"]) == (TRACE, 1, "vendor=1")
    assert trace["span_id"] != SPAN and int(trace["span_id"], 16)
    ours = f"00-{TRACE}-{trace['span_id']}-01"
    assert answer["out"] == {"X-Request-ID": answer["here"], "traceparent": ours, "tracestate": "vendor=1"}
    assert answer["seen"]["traceparent"] == [ours]


@pytest.mark.parametrize(
    "bad", ["", "00", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
            f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-01-x", f"00-{TRACE.upper()}-{SPAN}-01"]
)
def test_bad_trace_context_begins_a_trace(url: str, bad: str) -> None:
    answer = httpx.get(f"{url}/id", headers={"traceparent": bad, "tracestate": "vendor=1"}).json()
    assert answer["trace"]["trace_id"] != TRACE and answer["trace"]["tracestate"] == ""
    assert answer["seen"]["tracestate"] == []


def test_the_context_is_everywhere(url: str, records: Records) -> None:
    answer = httpx.get(f"{url}/everywhere", headers={"X-Request-ID": "req-9"})
    assert set(answer.json()["places"]) == {"req-9"}
    patience = time.monotonic() + 10
    while len(records.saying("background req-9")) < 2:
        assert time.monotonic() < patience
        time.sleep(0.01)
    assert {record.request_id for record in records.all} == {"req-9"}
    assert httpx.get(f"{url}/sync", headers={"X-Request-ID": "req-10"}).json() == {"here": "req-10"}


def test_marks_of_a_stream(url: str, marks: Marks) -> None:
    headers = {"X-Request-ID": "s", "X-Tenant": "acme", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    text = httpx.get(f"{url}/stream/5", headers=headers).text
    assert text == "s " * 5
    assert marks.end_of("s") == (5, FinishReason.STOP)
    number = marks.numbers()["s"]
    assert [mark[0] for mark in marks.of(number)] == ["request_begin", *["attr"] * 4, *["token"] * 5, "request_end"]
    assert [mark[2:] for mark in marks.of(number) if mark[0] == "token"] == [(0, i) for i in range(5)]
    begin = marks[0][2]
    assert (begin["tenant_id"], begin["model"], begin["trace_id"]) == ("acme", "llama", TRACE)
    assert abs(begin["received_ns"] - time.monotonic_ns()) < 60e9
    facts = {mark[3]: mark[4] for mark in marks if mark[0] == "attr"}
    assert facts == {"prompt_tokens": 5, "prompt_length": 15, "batch_size": 4, "model_version": "2"}


def test_fields_of_log_records(url: str, records: Records) -> None:
    headers = {"X-Request-ID": "s", "X-Tenant": "acme", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    httpx.get(f"{url}/stream/2", headers=headers)
    record = records.saying("token 0 of s")[0]
    assert (record.request_id, record.trace_id, record.trace_flags) == ("s", TRACE, "01")
    assert (record.tenant_id, record.model, record.model_version) == ("acme", "llama", "2")
    assert (record.prompt_length, record.input_tokens, record.batch_size) == (6, 2, 4)
    assert record.engine_hash is None and record.span_id not in (None, SPAN)


def test_reasons_of_ends(url: str, marks: Marks) -> None:
    for path, status, expected in [
        ("/sync", 200, (0, FinishReason.STOP)),
        ("/sync_stream/3", 200, (3, FinishReason.STOP)),
        ("/length", 200, (0, FinishReason.LENGTH)),
        ("/missing", 404, (0, FinishReason.ERROR)),
        ("/fails", 500, (0, FinishReason.ERROR)),
    ]:
        answer = httpx.get(url + path, headers={"X-Request-ID": path})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, path)
        assert marks.end_of(path) == expected, path


def test_an_exception_within_a_stream(url: str, marks: Marks, records: Records) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{url}/stream/5?fails_at=3", headers={"X-Request-ID": "torn"})
    assert marks.end_of("torn") == (3, FinishReason.ERROR)
    assert records.saying("closed torn")[0].request_id == "torn"
    assert httpx.get(f"{url}/sync", headers={"X-Request-ID": "next"}).json() == {"here": "next"}


def test_clients_that_go_away(url: str, marks: Marks, records: Records) -> None:
    async def leave(client: httpx.AsyncClient, number: int) -> None:
        path = f"{url}/stream/1000?pause=0.01"
        async with client.stream("GET", path, headers={"X-Request-ID": f"gone-{number}"}) as answer:
            async for _ in answer.aiter_bytes():
                break

    async def stay(client: httpx.AsyncClient, number: int) -> None:
        answer = await client.get(f"{url}/stream/20?pause=0.01", headers={"X-Request-ID": f"stays-{number}"})
        assert answer.text == f"stays-{number} " * 20

    async def both() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            await asyncio.gather(*(leave(client, i) for i in range(8)), *(stay(client, i) for i in range(8)))

    asyncio.run(both())
    for number in range(8):
        assert marks.end_of(f"stays-{number}") == (20, FinishReason.STOP)
        tokens, reason = marks.end_of(f"gone-{number}")
        assert reason == FinishReason.CANCELLED and 0 < tokens < 1000
        assert [record.request_id for record in records.saying(f"closed gone-{number}")] == [f"gone-{number}"]
    for record in records.all:
        assert record.getMessage().endswith(record.request_id)


def test_no_id_leaks_between_requests(url: str, marks: Marks, records: Records) -> None:
    """Many at a time, some on one connection after the other, of all kinds, and each sees only its own."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        headers = {"X-Request-ID": f"r{number}", "X-Tenant": f"t{number % 7}"}
        match number % 4:
            case 0:
                answer = await client.get(f"{url}/stream/{number % 9}?pause=0.002", headers=headers)
                assert answer.text == f"r{number} " * (number % 9)
            case 1:
                answer = await client.get(f"{url}/sync_stream/{number % 9}", headers=headers)
                assert answer.text == f"r{number} " * (number % 9)
            case 2:
                answer = await client.get(f"{url}/everywhere", headers=headers)
                assert set(answer.json()["places"]) == {f"r{number}"}
            case _:
                answer = await client.get(f"{url}/sync", headers=headers)
                assert answer.json() == {"here": f"r{number}"}
        assert answer.headers.get_list("x-request-id") == [f"r{number}"]

    async def all_() -> None:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            for block in range(0, 320, 64):
                await asyncio.gather(*(one(client, number) for number in range(block, block + 64)))

    asyncio.run(all_())
    numbers = marks.numbers()
    assert len(numbers) == 320 and len(set(numbers.values())) == 320
    for number in range(320):
        kind, id_ = number % 4, f"r{number}"
        assert marks.end_of(id_) == (number % 9 if kind < 2 else 0, FinishReason.STOP)
        begin = marks.of(numbers[id_])[0][2]
        assert begin["tenant_id"] == f"t{number % 7}"
    assert len(records.all) > 320
    for record in records.all:
        assert record.getMessage().endswith(f" {record.request_id}"), record.getMessage()
        assert record.tenant_id == f"t{int(record.request_id[1:]) % 7}"
    assert current() is None


def test_other_protocols_and_middleware_twice(marks: Marks) -> None:
    app = application()
    app.add_middleware(TracerMiddleware)
    install(app)
    with serving(app) as url:
        assert httpx.get(f"{url}/sync", headers={"X-Request-ID": "once"}).json() == {"here": "once"}
        assert marks.end_of("once") == (0, FinishReason.STOP)
        assert [mark[0] for mark in marks] == ["request_begin", "request_end"]


def test_outside_of_a_request_nothing_happens(marks: Marks) -> None:
    describe(tenant_id="nobody")
    token()
    finish(FinishReason.STOP)
    assert marks == [] and current() is None
