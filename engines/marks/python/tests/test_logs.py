"""Fields on records, and lines of JSON whatever is logged."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tracer_marks.context import Request, TraceContext, current_request
from tracer_marks.gpu import Sampler
from tracer_marks.logs import FIELDS, ContextFilter, JsonFormatter, fields

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)


def line(message: str, *args: Any, with_filter: bool = True, **kwargs: Any) -> Any:
    """What is logged, as read by who reads JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    if with_filter:
        handler.addFilter(ContextFilter(gpu=False))
    logger = logging.Logger("app.part")
    logger.addHandler(handler)
    logger.error(message, *args, **kwargs)
    assert stream.getvalue().count("\n") == 1
    return json.loads(stream.getvalue())


@pytest.mark.parametrize("with_filter", [True, False])
def test_json_has_what_is_known(with_filter: bool) -> None:
    request = Request("req-1", TRACE, tenant_id="acme", prompt_tokens=3, engine_hash="e3b0")
    reset = current_request.set(request)
    try:
        said = line("hello %s", "world", with_filter=with_filter, extra={"step": 7})
    finally:
        current_request.reset(reset)
    timestamp = said.pop("timestamp")
    assert timestamp.endswith("Z") and len(timestamp) == len("2026-01-01T00:00:00.000000Z")
    assert said == {
        "level": "ERROR", "logger": "app.part", "message": "hello world", "step": 7, "request_id": "req-1",
        "trace_id": TRACE.trace_id, "span_id": TRACE.span_id, "trace_flags": "01", "tenant_id": "acme",
        "input_tokens": 3, "engine_hash": "e3b0",
    }  # fmt: skip


def test_outside_of_a_request_nothing_is_claimed() -> None:
    assert fields() == {}
    assert set(line("x")) == {"timestamp", "level", "logger", "message"}


def test_what_json_cannot_hold_is_text() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert line("x", extra={"thing": object()})["thing"].startswith("<object")
    assert line("x", extra={"circle": circle})["circle"] == "[[...]]"
    assert line("\ud800 \x1b[31m\nsecond line")["message"] == "\ud800 \x1b[31m\nsecond line"


def test_exceptions_and_stacks() -> None:
    try:
        raise ValueError("planted")
    except ValueError:
        said = line("failed", exc_info=True, stack_info=True)
    assert "ValueError: planted" in said["exception"] and "test_logs" in said["stack"]


def test_the_filter_fills_formats_and_leaves_extras() -> None:
    record = logging.makeLogRecord({"tenant_id": "given"})
    assert ContextFilter(default="-", gpu=False).filter(record)
    text = logging.Formatter(" ".join(f"%({name})s" for name in FIELDS)).format(record)
    assert text.split() == ["-"] * 4 + ["given"] + ["-"] * 9


STANDIN = Path(__file__).parents[4] / "target/debug/libstandin_nvml.so"


def test_gpu_of_the_standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not STANDIN.exists() and "TRACER_REQUIRE" not in os.environ:
        pytest.skip(f"{STANDIN} is not built: cargo build --workspace")
    readings = tmp_path / "readings"
    readings.write_text("memory_used=123456789\nsleep_ms=50\n")
    monkeypatch.setenv("STANDIN_NVML_FILE", str(readings))
    sampler = Sampler(library=str(STANDIN))
    begin = time.monotonic()
    assert sampler.read() is None and time.monotonic() - begin < 0.04, "it waited for NVML"
    while (reading := sampler.read()) is None:
        assert time.monotonic() - begin < 10
        time.sleep(0.01)
    assert reading.device_id.startswith("GPU-") and reading.simulated
    said = fields(sampler)
    assert said == {
        "gpu_device_id": reading.device_id,
        "gpu_memory_used_bytes": reading.memory_used_bytes,
        "gpu_simulated": True,
    }
    child = os.fork()
    if child == 0:
        # The sampler's thread is not here any more: it is begun anew, once the reading is old.
        sampler._asked_s = -10.0
        sampler._reading = None
        until = time.monotonic() + 10
        while sampler.read() is None and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(0 if sampler.read() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_nvml_there_is_no_gpu() -> None:
    sampler = Sampler(library="libno-such-nvml.so.1")
    for _ in range(20):
        assert sampler.read() is None
        time.sleep(0.005)
    assert fields(sampler) == {}
