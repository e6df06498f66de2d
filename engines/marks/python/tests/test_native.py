"""Arguments: wrong types are told, values are never refused, and nothing crashes the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tracer_marks as marks

HOSTILE_INTS = [0, -1, 2**31, 2**32, 2**63, 2**64, -(2**64), 2**1000, True]
HOSTILE_TEXTS = ["", "\0", "x" * 1_000_000, "é" * 300, "\ud800", "a" * 255 + "\udfff", "\x1b[31m", "漢" * 1000]


class Index:
    def __index__(self) -> int:
        return 7


class Broken:
    def __index__(self) -> int:
        raise RuntimeError("no")


def test_nobody_listens() -> None:
    assert marks.listening() is False


@pytest.mark.parametrize("value", [*HOSTILE_INTS, Index()])
def test_any_int_will_do(value: Any) -> None:
    marks.request_begin(value, received_ns=value, trace_flags=value, prompt_tokens=value)
    marks.token(value, value, value)
    marks.attr(value, value, "key", value)
    slot = marks.Slot(
        value, sample_offset=value, generation_step=value, tokens=value, choice=value, phase=value, flags=value
    )
    marks.batch(value, value, [slot])
    marks.phase_begin(value, "phase")
    marks.request_end(value, value, value)


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_any_text_will_do(text: str) -> None:
    fields = ["request_id", "tenant_id", "model", "model_version", "engine_hash", "adapters", "kv_cache_strategy"]
    marks.request_begin(1, trace_id=text, span_id=text, **dict.fromkeys(fields, text))
    marks.phase_begin(1, text)
    marks.phase_end(1, text)
    marks.attr(1, 0, text, text)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -0.0, 1e308, 10**400, -(10**400), True])
def test_any_number_is_a_fact(number: float) -> None:
    marks.attr(1, 0, "key", number)


def test_numbers_are_brought_into_range() -> None:
    slot = marks.Slot(-1, sample_offset=-5, generation_step=2**40, choice=70_000, tokens=2**70)
    assert (slot.request, slot.sample_offset, slot.generation_step) == (2**64 - 1, 0, 2**32 - 1)
    assert (slot.choice, slot.tokens, slot.phase, slot.flags) == (65_535, 2**32 - 1, marks.DECODE, 0)
    assert "sample_offset=0" in repr(slot)


@pytest.mark.parametrize(
    "call",
    [
        lambda: marks.token("1", 0, 0),
        lambda: marks.token(1.5, 0, 0),
        lambda: marks.token(None, 0, 0),
        lambda: marks.token(1, 0),
        lambda: marks.request_begin(1, request_id=5),
        lambda: marks.request_begin(1, request_id=b"bytes"),
        lambda: marks.request_begin(1, trace_id=5),
        lambda: marks.request_begin(1, prompt_tokens="5"),
        lambda: marks.request_begin(1, unknown=5),
        lambda: marks.batch(1, 0, None),
        lambda: marks.batch(1, 0, [1]),
        lambda: marks.batch(1, 0, [marks.Slot(1, sample_offset=0, generation_step=0), None]),
        lambda: marks.attr(1, 0, "key", None),
        lambda: marks.attr(1, 0, "key", [1]),
        lambda: marks.attr(1, 0, 5, 5),
        lambda: marks.phase_begin(1, 5),
        lambda: marks.Slot(1, 0, 0),
    ],
)
def test_wrong_types_are_told(call: Any) -> None:
    with pytest.raises(TypeError):
        call()


def test_what_an_argument_raises_comes_through() -> None:
    with pytest.raises(RuntimeError):
        marks.token(Broken(), 0, 0)  # type: ignore[arg-type]

    def slots() -> Any:
        yield marks.Slot(1, sample_offset=0, generation_step=0)
        raise LookupError

    with pytest.raises(LookupError):
        marks.batch(1, 0, slots())


def hammer() -> None:
    slots = [marks.Slot(i, sample_offset=i, generation_step=0) for i in range(200)]
    for i in range(500):
        marks.request_begin(i, request_id="x" * i, trace_id=os.urandom(16), span_id="0" * 16)
        marks.batch(i, 0, slots)
        marks.token(i, 0, i)
        marks.request_end(i, 1, marks.FinishReason.STOP)


def test_threads_tasks_and_children() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: hammer(), range(8)))

    async def tasks() -> None:
        await asyncio.gather(*(asyncio.to_thread(hammer) for _ in range(4)))

    asyncio.run(tasks())
    child = os.fork()
    if child == 0:
        try:
            hammer()
            thread = threading.Thread(target=hammer)
            thread.start()
            thread.join()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_in_a_signal_handler() -> None:
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: (marks.token(1, 0, 0), seen.append(1)))
    try:
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGUSR1)
            marks.token(2, 0, 0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
