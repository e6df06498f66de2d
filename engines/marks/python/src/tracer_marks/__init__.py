"""Marks: how a program tells the tracer what a request is.

While nobody listens a mark costs about a tenth of a microsecond and does nothing. An argument of a wrong type is a
TypeError, whether or not somebody listens; a value of the right type is never refused: numbers are brought into range,
text is cut after 256 bytes of UTF-8 and what is no UTF-8 in it is replaced. Marks may be made from any thread, task or
child process.

    import tracer_marks as marks

    marks.request_begin(7, request_id="req-7", tenant_id="acme", model="llama", prompt_tokens=12)
    marks.batch(1, 0, [marks.Slot(7, sample_offset=0, generation_step=0, tokens=12, phase=marks.PREFILL)])
    ...                                                # the engine's step, on this thread
    marks.token(7, 0, 0)                               # handed to the client now
    marks.request_end(7, 1, marks.FinishReason.STOP)

`tracer_marks.fastapi` makes the marks of requests for you, `tracer_marks.logs` puts their ids on log records.
"""

from enum import IntEnum

from ._native import (
    DECODE,
    PREFILL,
    REQUEST_KEYS,
    SLOT_NO_TOKEN,
    Slot,
    attr,
    batch,
    listening,
    phase_begin,
    phase_end,
    request_begin,
    request_end,
    token,
)

__all__ = [
    "DECODE",
    "PREFILL",
    "REQUEST_KEYS",
    "SLOT_NO_TOKEN",
    "FinishReason",
    "Slot",
    "attr",
    "batch",
    "listening",
    "phase_begin",
    "phase_end",
    "request_begin",
    "request_end",
    "token",
]


class FinishReason(IntEnum):
    """Why a request ended."""

    UNKNOWN = 0
    STOP = 1
    LENGTH = 2
    #: The client went away or cancelled.
    CANCELLED = 3
    ERROR = 4
