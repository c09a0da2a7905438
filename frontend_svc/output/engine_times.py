"""Where an output spends its time in engines, and what happens to it there. Knows no stream and no text.

All on this process's clock: what an engine reports are ages, which are subtracted from the time of arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter_ns


class EventKind(Enum):
    """The scheduler events of an engine that matter here."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    RESUMED = 4  # in the batch again after a preemption


@dataclass(slots=True)
class Progress:
    """Events and times of a request in a step.

    events: each with how long before the arrival it happened.  first_age_ns: the same of the step with the
    first token; None: it is another one.  prefill_ns: how long that took from being scheduled; None: not
    reported.
    """

    events: list[tuple[EventKind, int]] = field(default_factory=list)
    first_age_ns: int | None = None
    prefill_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """An output was in a phase of an engine, QUEUE, PREFILL or DECODE."""

    phase: int
    engine_id: str
    start_ns: int
    end_ns: int
    attempt: int = 0  # at engines before this one


@dataclass(frozen=True, slots=True)
class Moment:
    """Something happened to an output in an engine: scheduled, preempted, resumed, first_token."""

    name: str
    engine_id: str
    at_ns: int


# Of one output. A request is moved some 30 times at most, but may be preempted without an end.
_MAX_STAYS = 96
_MAX_MOMENTS = 64


class EngineTimes:
    """Adds up the time of one output in the queue, the prefill and the decode of the engines that run it."""

    __slots__ = (
        "_engine_id", "_is_in", "_now_ns", "_since_ns", "boundary_ns", "moments", "num_migrations",
        "num_nan_logits", "num_preemptions", "spent_ns", "stays",
    )  # fmt: skip

    QUEUE, PREFILL, DECODE = range(3)

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._now_ns = now_ns
        self.spent_ns = [0, 0, 0]  # by QUEUE, PREFILL, DECODE
        self.num_preemptions = 0
        self.num_migrations = 0
        self.num_nan_logits = 0
        self.boundary_ns: int | None = None  # to an engine and, with the first answer, back
        self.stays: list[Stay] = []  # those that are over, as many as are kept
        self.moments: list[Moment] = []
        self._engine_id = ""
        self._is_in: int | None = None  # None: in no engine
        self._since_ns = 0

    def begin(self, num_attempts: int, engine_id: str) -> None:
        """The request is sent to an engine, or is found in one, after `num_attempts` others."""
        self._enter(self.QUEUE, self._now_ns())
        self._engine_id, self.num_migrations = engine_id, num_attempts

    def note(self, progress: Progress) -> None:
        """A step with this has just arrived."""
        now_ns = self._now_ns()
        for kind, age_ns in progress.events:
            if kind is EventKind.PREEMPTED:
                self.num_preemptions += 1
                self._note_moment("preempted", now_ns - age_ns)
            elif kind is EventKind.RESUMED:
                self._note_moment("resumed", now_ns - age_ns)
            elif self._is_in != self.QUEUE:
                continue
            elif kind is EventKind.SCHEDULED:
                self._enter(self.PREFILL, now_ns - age_ns)
                self._note_moment("scheduled", self._since_ns)
            elif (way_ns := now_ns - age_ns - self._since_ns) >= 0:
                self.boundary_ns = way_ns
            else:
                # Earlier than it began here: another frontend had sent it.
                self._since_ns = now_ns - age_ns
        if progress.first_age_ns is None or self._is_in is None:
            return
        if self._is_in == self.PREFILL and progress.prefill_ns is not None:
            # Steps that were merged have the age of the newest.
            self._enter(self.DECODE, min(now_ns, self._since_ns + progress.prefill_ns))
        else:
            # An engine that reports no events: all until the first token is prefill.
            self._is_in = self.PREFILL
            self._enter(self.DECODE, now_ns - progress.first_age_ns)
        # Of the output, not of an engine that it has moved to.
        if all(moment.name != "first_token" for moment in self.moments):
            self._note_moment("first_token", self._since_ns)

    def end(self) -> None:
        """The request has ended, or its engine is lost."""
        if self._is_in is not None:
            self._enter(None, self._now_ns())

    def _enter(self, phase: int | None, at_ns: int) -> None:
        if self._is_in is not None:
            at_ns = max(at_ns, self._since_ns)
            self.spent_ns[self._is_in] += at_ns - self._since_ns
            if len(self.stays) < _MAX_STAYS:
                stay = Stay(self._is_in, self._engine_id, self._since_ns, at_ns, self.num_migrations)
                self.stays.append(stay)
        self._is_in, self._since_ns = phase, at_ns

    def _note_moment(self, name: str, at_ns: int) -> None:
        if len(self.moments) < _MAX_MOMENTS:
            self.moments.append(Moment(name, self._engine_id, at_ns))
