"""Between the one producer of a request's output and its one reader. Knows no engine and no text rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from service_kit.errors import ResourceExhausted, ServiceError


class OutputKind(Enum):
    """What a reader gets: each piece, all so far each time, or all of it once at the end."""

    DELTA = 1
    CUMULATIVE = 2
    FINAL_ONLY = 3


class EndReason(Enum):
    """Why an output ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


@dataclass(frozen=True, slots=True)
class Ending:
    """How an output ended. At most one of the three matches is set, and only for STOP."""

    reason: EndReason
    stop_token_id: int | None = None
    eos_token_id: int | None = None
    stop_string: str | None = None

    @property
    def is_by_token(self) -> bool:
        """True when the last token ended the output, and is therefore no part of its text."""
        return self.stop_token_id is not None or self.eos_token_id is not None


@dataclass(frozen=True, slots=True)
class Output:
    """What a reader takes at once. `num_output_tokens` counts from the start; the last has an ending."""

    text: str
    token_ids: list[int]
    num_output_tokens: int
    num_cached_tokens: int
    ending: Ending | None


@dataclass(frozen=True, slots=True)
class ReaderLimit:
    """How much may wait for a reader, and how long it may stay that much."""

    max_tokens: int = 1024
    max_bytes: int = 256 * 1024
    grace_s: float = 30.0


class Collector:
    """One slot: what is not read yet merges, the producer never waits, an error overtakes everything.

    A reader that leaves more than its limit unread for the grace time is ended with ResourceExhausted;
    `on_slow` is then called once, so that the owner can stop the production.
    """

    __slots__ = (
        "_ending", "_error", "_interval", "_kind", "_limit", "_num_bytes", "_num_cached", "_num_output",
        "_num_unread", "_on_slow", "_text", "_timer", "_token_ids", "_wake",
    )  # fmt: skip

    def __init__(
        self, kind: OutputKind, *, stream_interval: int, limit: ReaderLimit, on_slow: Callable[[], None]
    ) -> None:
        self._kind = kind
        self._interval = stream_interval
        self._limit = limit
        self._on_slow = on_slow
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._num_bytes = 0
        self._num_unread = 0
        self._num_output = 0
        self._num_cached = 0
        self._ending: Ending | None = None
        self._error: ServiceError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    def put(self, text: str, token_ids: list[int], ending: Ending | None) -> None:
        """Add newly produced output, and with the last of it how it ended."""
        is_first = self._num_output == 0
        if text:
            self._text.append(text)
            self._num_bytes += len(text.encode())
        self._token_ids += token_ids
        self._num_output += len(token_ids)
        self._num_unread += len(token_ids)
        if ending is not None:
            self._ending = ending
        elif self._kind is OutputKind.FINAL_ONLY or (self._num_unread < self._interval and not is_first):
            return
        self._wake.set()
        if self._timer is None and self._is_over_limit():
            self._timer = asyncio.get_running_loop().call_later(self._limit.grace_s, self._end_slow_reader)

    def note_cached(self, num_cached_tokens: int) -> None:
        """Remember how much of the prompt came from the prefix cache."""
        self._num_cached = num_cached_tokens

    def fail(self, error: ServiceError) -> None:
        """End with `error`: it is read next, whatever else waits. The first error counts."""
        if self._error is None:
            self._error = error
            self._clear()
            self._wake.set()

    async def get(self) -> Output:
        """What was produced since the last call; waits for it. Raises what `fail` was given."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            # Stays set: a reader that asks again after the end is answered the same.
            self._wake.set()
            raise self._error
        text, token_ids = "".join(self._text), self._token_ids
        if self._kind is OutputKind.CUMULATIVE:
            self._text, token_ids = [text], list(token_ids)
            self._num_unread = 0
        else:
            self._clear()
        return Output(text, token_ids, self._num_output, self._num_cached, self._ending)

    def close(self) -> None:
        """Forget everything: the reader is gone."""
        self._clear()

    def _is_over_limit(self) -> bool:
        if self._kind is not OutputKind.DELTA:
            return False
        return self._num_unread > self._limit.max_tokens or self._num_bytes > self._limit.max_bytes

    def _end_slow_reader(self) -> None:
        limit = self._limit
        self.fail(
            ResourceExhausted(
                f"the client left more than {limit.max_tokens} tokens or {limit.max_bytes} bytes unread "
                f"for {limit.grace_s:g} s",
                reason="SLOW_READER",
            )
        )
        self._on_slow()

    def _clear(self) -> None:
        self._text, self._token_ids = [], []
        self._num_bytes = self._num_unread = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
