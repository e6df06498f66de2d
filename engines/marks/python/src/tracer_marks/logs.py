"""The current request on every log record: a filter for handlers, and a formatter that writes JSON lines.

    handler = logging.StreamHandler()
    handler.addFilter(ContextFilter())
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])

Add the filter to handlers, not to loggers: a logger's filter does not see the records of its children. With a
`QueueHandler` add it to that, since the other end of the queue knows no request.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Final

from .context import TraceContext, current
from .gpu import Sampler, sampler

#: What is put on every record. `trace_id`, `span_id`, `trace_flags` are named and written as OpenTelemetry has it for
#: logs in JSON: lower-case hexadecimal digits. `input_tokens` is its name for the prompt's tokens.
FIELDS: Final = (
    "request_id",
    "trace_id",
    "span_id",
    "trace_flags",
    "tenant_id",
    "model",
    "model_version",
    "engine_hash",
    "gpu_device_id",
    "gpu_memory_used_bytes",
    "gpu_simulated",
    "prompt_length",
    "input_tokens",
    "batch_size",
)

#: What every record has of its own: the rest was given by `extra`.
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def fields(gpu: Sampler | None = None) -> dict[str, Any]:
    """What is known here and now, by `FIELDS`; what is not known is left out. With OpenTelemetry, its current span."""
    request = current()
    trace = TraceContext.active() or (request.trace if request else None)
    known: dict[str, Any] = {}
    if trace is not None:
        known["trace_id"] = trace.trace_id
        known["span_id"] = trace.span_id
        known["trace_flags"] = f"{trace.trace_flags:02x}"
    if request is not None:
        known["request_id"] = request.request_id
        known["tenant_id"] = request.tenant_id
        known["model"] = request.model
        known["model_version"] = request.model_version
        known["engine_hash"] = request.engine_hash
        known["prompt_length"] = request.prompt_length
        known["input_tokens"] = request.prompt_tokens
        known["batch_size"] = request.batch_size
    reading = gpu.read() if gpu is not None else None
    if reading is not None:
        known["gpu_device_id"] = reading.device_id
        known["gpu_memory_used_bytes"] = reading.memory_used_bytes
        known["gpu_simulated"] = reading.simulated or None
    return {name: value for name, value in known.items() if value is not None}


class ContextFilter(logging.Filter):
    """Puts `FIELDS` on every record as attributes, for instance for `%(request_id)s`; lets every record pass.

    default: the value of what is not known. gpu_device: see `tracer_marks.gpu.Sampler`; gpu: False leaves the GPU out.
    What a caller gave by `extra` stays.
    """

    def __init__(self, *, default: Any = None, gpu: bool = True, gpu_device: int | str | None = None) -> None:
        super().__init__()
        self._default = default
        self._gpu = sampler(gpu_device) if gpu else None

    def filter(self, record: logging.LogRecord) -> bool:
        known = fields(self._gpu)
        for name in FIELDS:
            if name not in record.__dict__:
                record.__dict__[name] = known.get(name, self._default)
        return True


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `timestamp` (RFC 3339, UTC), `level`, `logger`, `message`, then `FIELDS` as far as known.

    Also what a caller gave by `extra`, and `exception` and `stack`. What JSON cannot hold is written as text. Takes the
    fields from the record where `ContextFilter` has put them, else from where it formats.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "timestamp": f"{seconds}.{int(record.created % 1 * 1e6):06d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        attributes = vars(record)
        if FIELDS[0] not in attributes:
            line |= fields()
        for name, value in attributes.items():
            if name not in _OWN and value is not None:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(line, default=str, ensure_ascii=True)
        except (TypeError, ValueError):
            # A key that is no str, or a circle.
            return json.dumps({str(name): str(value) for name, value in line.items()}, ensure_ascii=True)
