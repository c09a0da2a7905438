"""Buffer between the producer of a request's outputs and its reader. Knows no engine and no text rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from frontend_svc.output.logprobs import Logprobs
from frontend_svc.parsers.parser import Piece, ToolCallPiece
from triptych_kit.errors import ResourceExhausted, ServiceError

# Memory of the logprobs of one token, and of each of its alternatives, while they wait for the reader.
_LOGPROBS_BYTES = 320
_ALTERNATIVE_BYTES = 16
# Hard cap, as a multiple of the reader's limit; exceeding it ends the request at once.
_MAX_LIMITS = 4


class OutputKind(Enum):
    """Whether a reader gets deltas, the sum of all deltas each time, or all output once at the end."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL_ONLY = 3


class EndReason(Enum):
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


@dataclass(frozen=True, slots=True)
class DraftUse:
    """How many draft tokens an engine verified for an output, and how many it accepted."""

    num_proposed: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How an output ended. For STOP, at most one of the three matches is set; `message` is for ERROR.

    failure: the status with which the engine ended it; it is the whole request's.
    drafts: None if the engine reported none.
    error_fields: of the request, which leave no token together, if that is the error.
    turn_ended: whether the engine keeps the request for further input.
    """

    reason: EndReason
    stop_token_id: int | None = None
    eos_token_id: int | None = None
    stop_string: str | None = None
    message: str = ""  # for people
    failure: ServiceError | None = None
    drafts: DraftUse | None = None
    error_fields: tuple[str, ...] = ()
    turn_ended: bool = False

    @property
    def is_by_token(self) -> bool:
        """Whether the last token ended the output, and is therefore not part of its text."""
        return self.stop_token_id is not None or self.eos_token_id is not None


# Not frozen, like `Output`: one is created per token, and a frozen one would take four times as long.
@dataclass(slots=True)
class OutputPiece:
    """New output of one sample, or all of it. `num_output_tokens` counts from its start.

    parts: of a message, in place of text.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    num_output_tokens: int
    cumulative_logprob: float | None
    ending: Ending | None
    parts: Sequence[Piece] = ()


@dataclass(slots=True)
class Output:
    """The result of one read: pieces ordered by output index. Nothing follows the last one."""

    pieces: list[OutputPiece]
    num_cached_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class ReaderLimit:
    """How much output may be unread, and for how long it may exceed that."""

    max_tokens: int = 1024
    max_bytes: int = 256 * 1024
    grace_s: float = 30.0


class _Slot:
    """The unread part of one output."""

    __slots__ = (
        "cumulative_logprob",
        "ending",
        "is_delivered",
        "is_due",
        "logprobs",
        "num_output",
        "num_unread",
        "parts",
        "text",
        "token_ids",
    )  # fmt: skip

    def __init__(self) -> None:
        self.text: list[str] = []
        self.parts: list[Piece] = []
        self.token_ids: list[int] = []
        self.logprobs: Logprobs | None = None
        self.num_output = 0
        self.num_unread = 0
        self.cumulative_logprob: float | None = None
        self.ending: Ending | None = None
        self.is_due = False
        self.is_delivered = False

    def take(self, index: int, *, keeps: bool) -> OutputPiece:
        """The unread part, which is removed unless `keeps`."""
        text = "".join(self.text)
        piece = OutputPiece(
            index, text, self.token_ids, self.logprobs, self.num_output, self.cumulative_logprob, self.ending,
            self.parts,
        )  # fmt: skip
        self.is_due, self.is_delivered, self.num_unread = False, self.ending is not None, 0
        if keeps and not self.is_delivered:
            self.text, self.parts, self.token_ids = [text], list(self.parts), list(self.token_ids)
            if self.logprobs is not None:
                self.logprobs = _copy(self.logprobs)
        else:
            self.clear()
        return piece

    def clear(self) -> None:
        self.text, self.parts, self.token_ids, self.logprobs, self.num_unread = [], [], [], None, 0


class Collector:
    """A slot for each of n outputs. Unread output is merged, writing never waits, an error is read first.

    A slow reader, which leaves more than its limit unread for the grace time or four times the limit at any
    moment, is ended with ResourceExhausted; `on_slow` is then called once, so that the owner can abort the
    requests. With `awaits_first` nothing can be read before output 0 has begun.
    """

    __slots__ = (
        "_awaits_first", "_error", "_interval", "_is_ready", "_kind", "_limit", "_num_bytes",
        "_num_cached", "_num_open", "_num_unread", "_on_slow", "_reader", "_slots", "_timer", "_total_limit",
    )  # fmt: skip

    def __init__(
        self,
        kind: OutputKind,
        n: int = 1,
        *,
        stream_interval: int,
        limit: ReaderLimit,
        on_slow: Callable[[], None],
        awaits_first: bool = False,
    ) -> None:
        self._kind = kind
        self._interval = stream_interval
        self._limit = limit
        self._total_limit = ReaderLimit(n * limit.max_tokens, n * limit.max_bytes, limit.grace_s)
        self._on_slow = on_slow
        self._awaits_first = awaits_first
        self._slots = [_Slot() for _ in range(n)]
        self._num_open = n
        self._num_bytes = 0
        self._num_unread = 0
        self._num_cached = 0
        self._error: ServiceError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_ready = False
        self._reader: asyncio.Future[None] | None = None

    def put(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        ending: Ending | None,
        logprobs: Logprobs | None = None,
        cumulative_logprob: float | None = None,
        *,
        parts: Sequence[Piece] | None = None,
    ) -> None:
        """Add new tokens of one output; `ending` with the last of them."""
        if self._error is not None:
            return
        slot = self._slots[index]
        is_first = slot.num_output == 0
        if text:
            slot.text.append(text)
            self._num_bytes += len(text) if text.isascii() else len(text.encode())
        if parts:
            slot.parts += parts
            self._num_bytes += sum(map(_num_bytes, parts))
        num_tokens = len(token_ids)
        slot.token_ids += token_ids
        slot.num_output += num_tokens
        slot.num_unread += num_tokens
        self._num_unread += num_tokens
        if logprobs is not None:
            self._add_logprobs(slot, logprobs, cumulative_logprob)
        if ending is not None:
            slot.ending = ending
            self._num_open -= 1
        elif slot.num_unread < self._interval and not is_first:
            return
        slot.is_due = True
        was_ready = self._is_ready
        self._wake_if_due()
        limit = self._total_limit
        is_over = self._num_unread > limit.max_tokens or self._num_bytes > limit.max_bytes
        if is_over and self._kind is OutputKind.DELTA:
            self._give_grace(was_ready=was_ready)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache, as far as reported."""
        return self._num_cached

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will be added."""
        return not self._num_open or self._error is not None

    def note_cached(self, num_cached_tokens: int) -> None:
        self._num_cached = max(self._num_cached, num_cached_tokens)

    def fail(self, error: ServiceError) -> None:
        """End with `error`, which is read before anything unread. The first error counts."""
        if self._error is None:
            self._error = error
            self.close()
            self._wake()

    async def get(self) -> Output:
        """Wait for output and return all since the last call. Raises the error of `fail`."""
        if not self._is_ready:
            await self._wait()
        if self._error is not None:
            # Stays ready: further calls raise the same error.
            raise self._error
        self._is_ready = False
        keeps = self._kind is OutputKind.CUMULATIVE
        pieces = []
        for index, slot in enumerate(self._slots):
            if slot.is_due:
                self._num_unread -= slot.num_unread
                pieces.append(slot.take(index, keeps=keeps))
        self._num_bytes = 0
        self._stop_timer()
        is_last = not self._num_open and all(slot.is_delivered for slot in self._slots)
        return Output(pieces, self._num_cached, is_last)

    def close(self) -> None:
        """Drop everything: the reader is gone."""
        for slot in self._slots:
            slot.clear()
        self._num_bytes = self._num_unread = 0
        self._stop_timer()
        # `on_slow` refers to the owner of this object: only a full collection would free the cycle.
        self._on_slow = lambda: None

    def _add_logprobs(self, slot: _Slot, logprobs: Logprobs, cumulative: float | None) -> None:
        slot.cumulative_logprob = cumulative
        self._num_bytes += _LOGPROBS_BYTES * len(logprobs)
        self._num_bytes += _ALTERNATIVE_BYTES * sum(map(len, logprobs.top_ids))
        if slot.logprobs is None:
            slot.logprobs = logprobs
        else:
            slot.logprobs.extend(logprobs)

    def _wake_if_due(self) -> None:
        if self._kind is OutputKind.FINAL_ONLY and self._num_open:
            return
        if self._awaits_first and not (self._slots[0].num_output or self._slots[0].ending):
            return
        self._wake()

    def _wake(self) -> None:
        self._is_ready = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> None:
        # A plain future costs a third of an asyncio.Event, and there is only one reader.
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _is_over_all_limits(self) -> bool:
        limit, times = self._total_limit, _MAX_LIMITS
        return self._num_unread > times * limit.max_tokens or self._num_bytes > times * limit.max_bytes

    def _give_grace(self, *, was_ready: bool) -> None:
        # However much arrives at once, a reader is slow only if there was something to read before.
        if was_ready and self._is_over_all_limits():
            self._end_slow_reader()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limit.grace_s, self._end_slow_reader)

    def _end_slow_reader(self) -> None:
        limit, on_slow = self._limit, self._on_slow
        is_late = not self._is_over_all_limits()
        times, grace = ("", f" for {limit.grace_s:g} s") if is_late else (f"{_MAX_LIMITS} times ", "")
        self.fail(
            ResourceExhausted(
                f"slow consumer: the client left more than {times}{limit.max_tokens} tokens or "
                f"{limit.max_bytes} bytes an output unread{grace}",
                reason="SLOW_READER",
            )
        )
        on_slow()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _num_bytes(part: Piece) -> int:
    text = part.arguments_json if isinstance(part, ToolCallPiece) else part.text
    return len(text) if text.isascii() else len(text.encode())


def _copy(logprobs: Logprobs) -> Logprobs:
    copied = Logprobs()
    copied.extend(logprobs)
    return copied
