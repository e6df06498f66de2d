"""The request that is being served here, and its W3C trace context.

A context variable holds it, so that whatever runs for a request finds it: tasks, threads of `asyncio.to_thread` and of
Starlette's pool, background tasks, streaming generators. `loop.run_in_executor` and `Executor.submit` copy no context;
`ContextThreadPoolExecutor` does.
"""

from __future__ import annotations

import contextvars
import itertools
import re
import secrets
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from . import FinishReason, _native

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Identifiers from outside longer than this are replaced.
MAX_ID_CHARS: Final = 128
#: Longest `tracestate` that is passed on, as W3C Trace Context asks at least.
MAX_TRACESTATE_CHARS: Final = 512

_REQUEST_ID: Final = re.compile(rf"[A-Za-z0-9._:/+=@~-]{{1,{MAX_ID_CHARS}}}")
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE: Final = re.compile(rf"[\x20-\x7e]{{1,{MAX_TRACESTATE_CHARS}}}")
_SAMPLED: Final = 1

# Above what an engine in the same process is likely to number its requests by.
_numbers: Final = itertools.count((secrets.randbits(31) | 1 << 31) << 32)


def is_valid_request_id(text: str) -> bool:
    """Whether an identifier from outside may go into logs, headers and file names as it is."""
    return _REQUEST_ID.fullmatch(text) is not None


def new_request_id() -> str:
    """32 hexadecimal digits, a UUID of version 4."""
    return uuid.uuid4().hex


class TraceContext(NamedTuple):
    """W3C Trace Context: lower-case hexadecimal identifiers, as in `traceparent`."""

    trace_id: str
    span_id: str
    trace_flags: int
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """What the two headers say; None where `traceparent` is invalid. An invalid `tracestate` is dropped."""
        match = _TRACEPARENT.fullmatch(traceparent.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        valid = version != "ff" and int(trace_id, 16) and int(span_id, 16) and (version != "00" or more is None)
        if not valid:
            return None
        tracestate = tracestate if _TRACESTATE.fullmatch(tracestate) else ""
        return cls(trace_id, span_id, int(flags, 16), tracestate)

    @classmethod
    def new(cls) -> TraceContext:
        """Begins a trace, sampled."""
        return cls(_random_id(16), _random_id(8), _SAMPLED)

    @classmethod
    def active(cls) -> TraceContext | None:
        """OpenTelemetry's current span, where the program uses OpenTelemetry and one is active."""
        trace = sys.modules.get("opentelemetry.trace")
        if trace is None:
            return None
        span = trace.get_current_span().get_span_context()
        if not span.is_valid:
            return None
        tracestate = span.trace_state.to_header() if span.trace_state else ""
        return cls(f"{span.trace_id:032x}", f"{span.span_id:016x}", int(span.trace_flags), tracestate)

    def child(self) -> TraceContext:
        """A span of its own in the same trace."""
        return self._replace(span_id=_random_id(8))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags:02x}"


def _random_id(size: int) -> str:
    """Hexadecimal digits of so many random bytes, not all zero."""
    return f"{secrets.randbits(8 * size) or 1:0{2 * size}x}"


@dataclass(slots=True, eq=False)
class Request:
    """A request while it is served. What is not known is None."""

    request_id: str
    trace: TraceContext
    #: The number by which marks name it, unique in the process; hand it to an engine that makes batch marks.
    number: int = field(default_factory=lambda: next(_numbers))
    tenant_id: str | None = None
    model: str | None = None
    model_version: str | None = None
    #: Digest of the engine file.
    engine_hash: str | None = None
    #: Names of the adapters, separated by commas.
    adapters: str | None = None
    kv_cache_strategy: str | None = None
    #: Characters of the prompt.
    prompt_length: int | None = None
    #: Tokens of the prompt.
    prompt_tokens: int | None = None
    #: Requests in the batch that serves it.
    batch_size: int | None = None
    finish_reason: FinishReason | None = None
    ended: bool = False
    _tokens: dict[int, itertools.count[int]] = field(default_factory=dict)
    _output_tokens: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, received_ns: int) -> None:
        """Marks its begin; `received_ns` as of time.monotonic_ns()."""
        _native.request_begin(
            self.number,
            request_id=self.request_id,
            received_ns=received_ns,
            trace_id=self.trace.trace_id,
            span_id=self.trace.span_id,
            trace_flags=self.trace.trace_flags,
            prompt_tokens=self.prompt_tokens or 0,
            tenant_id=self.tenant_id,
            model=self.model,
            model_version=self.model_version,
            engine_hash=self.engine_hash,
            adapters=self.adapters,
            kv_cache_strategy=self.kv_cache_strategy,
        )

    def describe(
        self,
        *,
        tenant_id: str | None = None,
        model: str | None = None,
        model_version: str | None = None,
        engine_hash: str | None = None,
        adapters: str | None = None,
        kv_cache_strategy: str | None = None,
        prompt_length: int | None = None,
        prompt_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Tells what has become known of the request, to logs and to the tracer."""
        facts: dict[str, str | int | None] = {
            "tenant_id": tenant_id,
            "model": model,
            "model_version": model_version,
            "engine_hash": engine_hash,
            "adapters": adapters,
            "kv_cache_strategy": kv_cache_strategy,
            "prompt_length": prompt_length,
            "prompt_tokens": prompt_tokens,
            "batch_size": batch_size,
        }
        for name, value in facts.items():
            if value is not None:
                setattr(self, name, value)
                if not self.ended:
                    _native.attr(self.number, 0, name, value)

    def token(self, choice: int = 0) -> None:
        """Marks that the next token of a choice is handed to the client now. After the request's end it does nothing."""
        if not self.ended:
            # `setdefault` and `next` are atomic: tokens may come from several threads.
            index = next(self._tokens.setdefault(choice, itertools.count()))
            next(self._output_tokens)
            _native.token(self.number, choice, index)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part of the request's life."""
        _native.phase_begin(self.number, name)
        try:
            yield
        finally:
            _native.phase_end(self.number, name)

    def end(self, finish_reason: FinishReason) -> None:
        """Marks its end, once; a reason that was set before counts."""
        if not self.ended:
            self.ended = True
            reason = finish_reason if self.finish_reason is None else self.finish_reason
            self.finish_reason = reason
            _native.request_end(self.number, next(self._output_tokens), reason)

    def headers(self) -> dict[str, str]:
        """Headers by which a server that is asked on behalf of this request knows it."""
        trace = TraceContext.active() or self.trace
        headers = {"X-Request-ID": self.request_id, "traceparent": trace.traceparent}
        if trace.tracestate:
            headers["tracestate"] = trace.tracestate
        return headers


current_request: Final[contextvars.ContextVar[Request | None]] = contextvars.ContextVar(
    "tracer_marks.current_request", default=None
)


def current() -> Request | None:
    """The request that is being served here; None outside of one."""
    return current_request.get()


class ContextThreadPoolExecutor(ThreadPoolExecutor):
    """A thread pool whose work runs in the context of whoever submits it.

    `loop.set_default_executor(ContextThreadPoolExecutor())` serves `loop.run_in_executor(None, …)`.
    """

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        run: Any = contextvars.copy_context().run
        return super().submit(run, fn, *args, **kwargs)
