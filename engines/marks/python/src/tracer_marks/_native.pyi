from collections.abc import Iterable
from typing import Final, SupportsFloat, SupportsIndex, final

PREFILL: Final[int]
DECODE: Final[int]
#: Slot flag: this step yields no token for the slot (a chunk of a longer prefill).
SLOT_NO_TOKEN: Final[int]
#: Keys of attr() that set what request_begin() left open; prompt_tokens is a number, the others are str.
REQUEST_KEYS: Final[list[str]]

@final
class Slot:
    """One request in a batch."""

    def __new__(
        cls,
        request: SupportsIndex,
        *,
        sample_offset: SupportsIndex,
        generation_step: SupportsIndex,
        tokens: SupportsIndex = 1,
        choice: SupportsIndex = 0,
        phase: SupportsIndex = ...,
        flags: SupportsIndex = 0,
    ) -> Slot: ...
    @property
    def request(self) -> int: ...
    @property
    def sample_offset(self) -> int:
        """Position of the request in the batch's tensors (never to be confused with batch_id)."""
    @property
    def generation_step(self) -> int:
        """Index of the token that this step generates (0 for the prefill)."""
    @property
    def tokens(self) -> int:
        """Tokens that the step processes for this request."""
    @property
    def choice(self) -> int: ...
    @property
    def phase(self) -> int:
        """PREFILL or DECODE."""
    @property
    def flags(self) -> int:
        """SLOT_NO_TOKEN, or 0."""

def listening() -> bool:
    """Whether a tracer listens now. Worth asking before gathering what a mark would say."""

def request_begin(
    request: SupportsIndex,
    *,
    request_id: str | None = None,
    received_ns: SupportsIndex = 0,
    trace_id: str | bytes | None = None,
    span_id: str | bytes | None = None,
    trace_flags: SupportsIndex = 0,
    prompt_tokens: SupportsIndex = 0,
    tenant_id: str | None = None,
    model: str | None = None,
    model_version: str | None = None,
    engine_hash: str | None = None,
    adapters: str | None = None,
    kv_cache_strategy: str | None = None,
) -> None:
    """The program took a request in.

    request: the program's own number, unique in the process while the request lives; any int, modulo 2^64.
    received_ns: time.monotonic_ns() at which it was received; 0: now.
    trace_id, span_id: W3C trace context, 16 and 8 bytes or their hexadecimal digits; another length: unknown.
    engine_hash: digest of the engine file. adapters: names, separated by commas.
    kv_cache_strategy: how its KV cache is kept, in the program's own words.
    What becomes known later is told by attr(), with the argument's name as key (REQUEST_KEYS).
    """

def request_end(request: SupportsIndex, output_tokens: SupportsIndex, finish_reason: SupportsIndex) -> None:
    """The program is done with a request.

    output_tokens counts the tokens of all choices; finish_reason is a FinishReason.
    """

def batch(batch_id: SupportsIndex, rank: SupportsIndex, slots: Iterable[Slot]) -> None:
    """The next step of this thread serves these requests.

    batch_id numbers the iteration, unique in the process: the steps of several ranks of one iteration share it.
    """

def token(request: SupportsIndex, choice: SupportsIndex, index: SupportsIndex) -> None:
    """The program hands token `index` (from 0) of a choice to its client."""

def phase_begin(request: SupportsIndex, name: str | None) -> None:
    """A named part of a request's life begins."""

def phase_end(request: SupportsIndex, name: str | None) -> None:
    """A named part of a request's life ends."""

def attr(request: SupportsIndex, choice: SupportsIndex, key: str | None, value: str | SupportsFloat | SupportsIndex) -> None:
    """A fact about one choice of a request: a number or a str."""
