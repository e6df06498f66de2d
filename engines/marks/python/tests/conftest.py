"""What the tests share: marks that are written down, log records, and a real uvicorn on a real socket."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from tracer_marks import _native, context
from tracer_marks.logs import ContextFilter


class Marks(list[tuple[Any, ...]]):
    """Marks in the order in which they were made: (function, arguments …)."""

    def of(self, number: int) -> list[tuple[Any, ...]]:
        return [mark for mark in self if mark[1] == number]

    def numbers(self) -> dict[str, int]:
        """Numbers of requests, by the ids that their begins say."""
        return {mark[2]["request_id"]: mark[1] for mark in self if mark[0] == "request_begin"}

    def end_of(self, request_id: str) -> tuple[int, int]:
        """(tokens, finish reason); waits, since a client knows of an end before the server has marked it."""
        patience = time.monotonic() + 10
        while True:
            ends = [mark for mark in self.of(self.numbers()[request_id]) if mark[0] == "request_end"]
            if ends:
                assert len(ends) == 1
                return ends[0][2:]
            assert time.monotonic() < patience, f"{request_id} has no end"
            time.sleep(0.005)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Marks:
    """Each mark is written down, and made."""
    made = Marks()

    def recorded(name: str) -> Callable[..., None]:
        def mark(*args: Any, **kwargs: Any) -> None:
            made.append((name, *args, *([kwargs] if kwargs else [])))
            getattr(_native, name)(*args, **kwargs)

        return mark

    names = ["request_begin", "request_end", "token", "attr", "phase_begin", "phase_end"]
    monkeypatch.setattr(context, "_native", SimpleNamespace(**{name: recorded(name) for name in names}))
    return made


class Records(logging.Handler):
    """Keeps what is logged, with the context's fields."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []
        self.addFilter(ContextFilter(gpu=False))

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record)

    def saying(self, message: str) -> list[Any]:
        return [record for record in self.all if record.getMessage() == message]


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logger = logging.getLogger("app")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """The address of a uvicorn that serves this application."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        patience = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < patience, "the server does not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
