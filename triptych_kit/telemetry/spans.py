"""Traces as plain data: each is a root span and its children, made when all of them have ended.

Knows no exporter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from opentelemetry.trace import TraceState

Value = str | bool | int | float | tuple[str, ...]
# By OpenTelemetry's kinds. server: of a request that another process sent; client: of one sent to another.
SpanKind = Literal["internal", "client", "server"]

_ID_MASK = (1 << 64) - 1
# An odd number, so that the ids of 2^64 children differ.
_ID_STEP = 0x9E3779B97F4A7C15
_NO_ATTRIBUTES: Mapping[str, Value] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    unix_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A finished span. Ids are lower-case hex; `parent_span_id` is "" for a root.

    error: with what it failed, for people; None: it did not fail.
    """

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str | None = None
    kind: SpanKind = "internal"

    @property
    def duration_ms(self) -> float:
        return (self.end_unix_ns - self.start_unix_ns) / 1e6


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace of a root span and its children. parent_id: of the caller's span; 0: none."""

    trace_id: int
    span_id: int
    parent_id: int = 0
    is_sampled: bool = True
    state: TraceState | None = None

    @property
    def traceparent(self) -> str:
        """W3C traceparent that makes spans of other processes children of the root."""
        return self._traceparent_of(self.span_id)

    def traceparent_of_child(self, index: int) -> str:
        """W3C traceparent that makes spans of other processes children of `child(index, ...)`."""
        return self._traceparent_of(self._child_id(index))

    def root(
        self,
        name: str,
        start_unix_ns: int,
        end_unix_ns: int,
        attributes: Mapping[str, Value] = _NO_ATTRIBUTES,
        events: Sequence[SpanEvent] = (),
        error: str | None = None,
        *,
        kind: SpanKind = "server",
    ) -> SpanRecord:
        parent = f"{self.parent_id:016x}" if self.parent_id else ""
        return SpanRecord(
            name,
            f"{self.trace_id:032x}",
            f"{self.span_id:016x}",
            parent,
            start_unix_ns,
            end_unix_ns,
            attributes,
            events,
            error,
            kind,
        )

    def child(
        self,
        index: int,
        name: str,
        start_unix_ns: int,
        end_unix_ns: int,
        attributes: Mapping[str, Value] = _NO_ATTRIBUTES,
        error: str | None = None,
        *,
        kind: SpanKind = "internal",
        below: int | None = None,
    ) -> SpanRecord:
        """A child of the root. index: from 0; the id follows from it, so that it is the same each time.

        below: the index of the child that is its parent; None: the root is.
        """
        return SpanRecord(
            name,
            f"{self.trace_id:032x}",
            f"{self._child_id(index):016x}",
            f"{self.span_id if below is None else self._child_id(below):016x}",
            start_unix_ns,
            end_unix_ns,
            attributes,
            error=error,
            kind=kind,
        )

    def _child_id(self, index: int) -> int:
        return (self.span_id + (index + 1) * _ID_STEP) & _ID_MASK or 1

    def _traceparent_of(self, span_id: int) -> str:
        return f"00-{self.trace_id:032x}-{span_id:016x}-{self.is_sampled:02x}"


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace that has ended. `make_spans` makes its spans, the root first, and the same each time."""

    context: TraceContext
    make_spans: Callable[[], Sequence[SpanRecord]]
