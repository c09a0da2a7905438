"""Records of one request in the frontend: its trace, made when it has ended, and a log line.

docs/tracing.md describes the trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns, time_ns
from types import TracebackType

from frontend_svc.generation.caller import Caller
from frontend_svc.generation.failover import Move
from frontend_svc.output.engine_times import EngineTimes, Stay
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.workers.workers import noting_wait
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_kit.addresses import split_address
from triptych_kit.errors import InvalidArgument, NotFound, ServiceError
from triptych_kit.rules import rules_of
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.spans import SpanEvent, SpanRecord, TraceContext, Value
from triptych_kit.telemetry.traces import begin_trace, bind_log_fields, current_method, record_trace

logger = logging.getLogger(__name__)

# A longer id is refused later, when the request is checked.
_MAX_ID_CHARS = rules_of(generate_pb2.GenerateRequest, "request_id").max_chars
# Of one trace, whatever n is and however often a request is moved or preempted.
_MAX_STAYS = 126
_MAX_MOMENTS = 128
_MAX_MOVES = 64
_MAX_ATTEMPTS = 64
_PHASES = {EngineTimes.QUEUE: "queue", EngineTimes.PREFILL: "prefill", EngineTimes.DECODE: "decode"}
_ALWAYS_SHOWN = {
    names.REQUEST_TEMPERATURE: "temperature",
    names.REQUEST_TOP_P: "top_p",
    names.REQUEST_TOP_K: "top_k",
    names.REQUEST_MAX_TOKENS: "max_tokens",
}
_SHOWN_IF_SET = {
    names.REQUEST_FREQUENCY_PENALTY: "frequency_penalty",
    names.REQUEST_PRESENCE_PENALTY: "presence_penalty",
}
_ENGINE_ERROR = "ENGINE_ERROR"


@dataclass(slots=True)
class Attempt:
    """An output at an engine. Its span is the parent of the one that the engine makes.

    number: how often the output was sent before.  attributes: empty if it was not sent after all.
    lost: by what the output had to leave the engine; "": it did not.
    """

    output_index: int
    number: int
    start_ns: int = 0
    end_ns: int = 0
    attributes: Mapping[str, Value] = field(default_factory=dict)
    lost: str = ""


@dataclass(slots=True)
class RequestTimeline:
    """Where and when a request was: all that its spans are made of, and nothing of its content.

    Times are nanoseconds of `perf_counter_ns` unless they are named unix.
    """

    context: TraceContext
    operation: str
    start_unix_ns: int
    start_ns: int
    end_ns: int = 0
    model: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    tokenizing_ns: tuple[int, int] | None = None
    text_queue_us: int = 0  # of the time of tokenizing, waiting for a text worker
    detokenizing: tuple[int, int, int] | None = None  # from and to in unix time, and how long of that
    attempts: list[Attempt] = field(default_factory=list)
    stays: list[StayOfOutput] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        """By the GenAI conventions: the operation and the model."""
        return f"{self.operation} {self.model}".rstrip()

    def add_outputs(self, outputs: Sequence[EngineTimes]) -> None:
        """Take over where the outputs were, up to the limits of a trace."""
        of_outputs: list[dict[str, Value]] = [
            {names.OUTPUT_INDEX: index} if len(outputs) > 1 else {} for index in range(len(outputs))
        ]
        stays = [
            (index, stay, {names.ENGINE: stay.engine_id, **of_outputs[index]})
            for index, times in enumerate(outputs)
            for stay in times.stays
        ]
        moments = [
            (moment, {names.ENGINE: moment.engine_id, **of_output})
            for times, of_output in zip(outputs, of_outputs, strict=True)
            for moment in times.moments
        ]
        for attempt in self.attempts:
            of_output = outputs[attempt.output_index].stays
            own = [stay for stay in of_output if stay.attempt == attempt.number]
            if own:
                attempt.start_ns, attempt.end_ns = own[0].start_ns, own[-1].end_ns
                attempt.attributes = {
                    names.ENGINE: own[0].engine_id,
                    names.ATTEMPT: attempt.number,
                    **of_outputs[attempt.output_index],
                }
        self.stays = stays[:_MAX_STAYS]
        if len(stays) > _MAX_STAYS:
            self.attributes[names.NUM_DROPPED_SPANS] = len(stays) - _MAX_STAYS
        for moment, attributes in sorted(moments, key=lambda one: one[0].at_ns)[:_MAX_MOMENTS]:
            self.events.append(SpanEvent(moment.name, self._unix_ns(moment.at_ns), attributes))

    def spans(self) -> list[SpanRecord]:
        """The request's span, then tokenize, attempts at engines, the stays below them, and detokenize."""
        numbers = count(_MAX_ATTEMPTS)
        child = self.context.child
        children = []
        if self.tokenizing_ns is not None:
            start_ns, end_ns = map(self._unix_ns, self.tokenizing_ns)
            waited = {names.QUEUE_US: self.text_queue_us}
            children.append(child(next(numbers), "tokenize", start_ns, end_ns, waited))
        below: dict[tuple[int, int], int] = {}
        for number, attempt in enumerate(self.attempts):
            if not attempt.attributes:
                continue
            below[attempt.output_index, attempt.number] = number
            start_ns, end_ns = self._unix_ns(attempt.start_ns), self._unix_ns(attempt.end_ns)
            error = attempt.lost or None
            children.append(
                child(number, "engine", start_ns, end_ns, attempt.attributes, error, kind="client")
            )
        for index, stay, attributes in self.stays:
            start_ns, end_ns = self._unix_ns(stay.start_ns), self._unix_ns(stay.end_ns)
            parent = below.get((index, stay.attempt))
            phase = _PHASES[stay.phase]
            children.append(child(next(numbers), phase, start_ns, end_ns, attributes, below=parent))
        if self.detokenizing is not None:
            start_ns, end_ns, busy_ns = self.detokenizing
            busy = {names.BUSY_US: busy_ns // 1000}
            children.append(child(next(numbers), "detokenize", start_ns, end_ns, busy))
        root = self.context.root(
            self.name,
            self.start_unix_ns,
            self._unix_ns(self.end_ns),
            self.attributes,
            sorted(self.events, key=lambda event: event.unix_ns),
            self.error,
        )
        return [root, *children]

    def _unix_ns(self, at_ns: int) -> int:
        return self.start_unix_ns + at_ns - self.start_ns


# The index of the output, and the attributes of the span.
StayOfOutput = tuple[int, Stay, dict[str, Value]]


class RequestTraces:
    """Begins the traces of a frontend's requests.

    slow_ms: a request that takes longer is exported even if it is not sampled; 0: none is.
    address: where clients reach this frontend over gRPC, host:port; empty: they are in this process.
    """

    def __init__(self, *, slow_ms: int = 0) -> None:
        self.slow_ms = slow_ms
        self.address = ""

    def begin(self, operation: str, request_id: str, caller: Caller) -> RequestTrace:
        context = begin_trace(operation, caller.traceparent, caller.tracestate)
        timeline = RequestTimeline(context, operation, time_ns(), perf_counter_ns())
        request_id = request_id[:_MAX_ID_CHARS]
        timeline.attributes = {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_ID: request_id,
            names.RESPONSE_ID: request_id,
        }
        with contextlib.suppress(ValueError):  # a unix socket
            host, port = split_address(caller.server or self.address)
            timeline.attributes |= {names.SERVER_ADDRESS: host, names.SERVER_PORT: port}
        if caller.identity.account:
            timeline.attributes[names.ACCOUNT] = caller.identity.account
        method = current_method()
        if method:
            timeline.attributes |= {names.RPC_SYSTEM_NAME: names.GRPC, names.RPC_METHOD: method}
        return RequestTrace(
            timeline, request_id, slow_ns=self.slow_ms * 1_000_000, is_repeated=caller.is_repeated
        )


class RequestTrace:
    """Records one request, from its arrival to its end, which is logged."""

    def __init__(
        self,
        timeline: RequestTimeline,
        request_id: str,
        *,
        slow_ns: int,
        is_repeated: Callable[[ServiceError], bool],
    ) -> None:
        self.abort_cause = "client"
        self._timeline = timeline
        self._request_id = request_id
        self._slow_ns = slow_ns
        self._is_repeated = is_repeated
        self._reason = "stop"
        self._fields: dict[str, str | int | float] = {}  # of the log line

    def __enter__(self) -> RequestTrace:
        bind_log_fields(request_id=self._request_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ServiceError) and self._is_repeated(error):
            return
        timeline = self._timeline
        cause, code = self._end(error)
        timeline.end_ns = perf_counter_ns()
        if names.RPC_METHOD in timeline.attributes:
            timeline.attributes[names.RPC_STATUS_CODE] = code
        duration_ns = timeline.end_ns - timeline.start_ns
        is_slow = 0 < self._slow_ns <= duration_ns
        record_trace(timeline.context, timeline.spans, is_notable=is_slow or timeline.error is not None)
        logger.info(
            "request ended",
            extra={
                "request_id": self._request_id,
                "reason": self._reason,
                **({"cause": cause} if cause else {}),
                "duration_ms": round(duration_ns / 1e6, 1),
                **self._fields,
            },
        )

    @property
    def traceparent(self) -> str:
        """W3C traceparent that makes spans of other processes children of this request."""
        return self._timeline.context.traceparent

    def begin_attempt(self, output_index: int, number: int) -> str:
        """An output is sent to an engine: the W3C traceparent of the span below which the engine has its own.

        That of the request itself, where it has been sent very often.
        """
        attempts, context = self._timeline.attempts, self._timeline.context
        if len(attempts) >= _MAX_ATTEMPTS:
            return context.traceparent
        attempts.append(Attempt(output_index, number))
        return context.traceparent_of_child(len(attempts) - 1)

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        start_ns = perf_counter_ns()
        with noting_wait() as wait:
            try:
                yield
            finally:
                self._timeline.tokenizing_ns = start_ns, perf_counter_ns()
                self._timeline.text_queue_us = round(wait.seconds * 1e6)

    def note_model(self, model: str, num_prompt_tokens: int) -> None:
        """Record what is known once the request is tokenized."""
        self._fields |= {"model": model, "num_prompt_tokens": num_prompt_tokens}
        self._timeline.model = model
        self._timeline.attributes |= {
            names.REQUEST_MODEL: model,
            names.RESPONSE_MODEL: model,
            names.USAGE_INPUT_TOKENS: num_prompt_tokens,
        }

    def note_sampling(
        self, sampling: sampling_pb2.SamplingParams, n: int, seed: int | None, *, is_stream: bool
    ) -> None:
        """Record the parameters, when all defaults are filled in."""
        attributes = self._timeline.attributes
        attributes[names.REQUEST_STREAM] = is_stream
        attributes[names.OUTPUT_TYPE] = "text"
        if seed is not None:
            attributes[names.REQUEST_SEED] = seed
        if n != 1:
            attributes[names.REQUEST_CHOICE_COUNT] = n
        for name, parameter in _ALWAYS_SHOWN.items():
            attributes[name] = getattr(sampling, parameter)
        for name, parameter in _SHOWN_IF_SET.items():
            value = getattr(sampling, parameter)
            if value:
                attributes[name] = value

    def note_migration(self, move: Move, num_output_tokens: int) -> None:
        """Record that the request moved to another engine with `num_output_tokens`."""
        newest = max((attempt.number for attempt in self._timeline.attempts), default=0)
        for attempt in self._timeline.attempts:
            if attempt.number < newest and not attempt.lost:
                attempt.lost = move.cause.value
        if len(self._timeline.events) < _MAX_MOVES:
            self._add_event(
                "resumed_elsewhere",
                {
                    names.CAUSE: move.cause.value,
                    names.FROM_ENGINE: move.origin,
                    names.TO_ENGINE: move.target,
                    names.NUM_OUTPUT_TOKENS: num_output_tokens,
                },
            )

    def note_output(
        self, states: Sequence[RequestState], num_output_tokens: int, reasons: Sequence[str], engine_id: str
    ) -> None:
        """Record the result. reasons: why the outputs ended, the last one last."""
        timeline = self._timeline
        # One that failed or was aborted makes the request one that was.
        self._reason = next((reason for reason in ("error", "abort") if reason in reasons), reasons[-1])
        times = _times_of(states)
        num_cached_tokens = states[0].collector.num_cached_tokens
        self._fields |= {
            "num_cached_tokens": num_cached_tokens,
            "num_output_tokens": num_output_tokens,
            **times,
            "engine": engine_id,
        }
        timeline.add_outputs([state.times for state in states])
        timeline.attributes |= {
            names.USAGE_OUTPUT_TOKENS: num_output_tokens,
            names.USAGE_CACHE_READ_TOKENS: num_cached_tokens,
            names.RESPONSE_FINISH_REASONS: tuple(reasons),
            names.QUEUE_US: timeline.text_queue_us + round(times["queue_ms"] * 1000),
            names.NUM_PREEMPTIONS: times["num_preemptions"],
            names.NUM_MIGRATIONS: times["num_migrations"],
        }
        drafts = [state.ending.drafts for state in states if state.ending and state.ending.drafts]
        if drafts:
            timeline.attributes |= {
                names.NUM_DRAFT_TOKENS: sum(use.num_proposed for use in drafts),
                names.NUM_ACCEPTED_DRAFT_TOKENS: sum(use.num_accepted for use in drafts),
            }
        begun = [state for state in states if state.first_output_at_ns]
        if begun:
            first_at_ns = min(state.first_output_at_ns for state in begun)
            busy_ns = sum(state.detokenize_ns for state in begun)
            timeline.detokenizing = first_at_ns, max(state.last_output_at_ns for state in begun), busy_ns
            if timeline.attributes.get(names.REQUEST_STREAM):
                to_first_s = (first_at_ns - timeline.start_unix_ns) / 1e9
                timeline.attributes[names.RESPONSE_TIME_TO_FIRST_CHUNK] = to_first_s

    def _end(self, error: BaseException | None) -> tuple[str, str]:
        """The cause of an early end, and the status of the call."""
        timeline = self._timeline
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._reason = "abort"
            self._add_event("aborted", {names.CAUSE: self.abort_cause})
            return self.abort_cause, "DEADLINE_EXCEEDED" if self.abort_cause == "deadline" else "CANCELLED"
        if error is not None:
            code = message = cause = "INTERNAL"
            if isinstance(error, ServiceError):
                code, cause = error.code.name, error.reason or error.code.name
                message = _without_values(error, cause)
            self._reason, timeline.error = "error", message
            timeline.attributes |= {names.ERROR_TYPE: code, names.ERROR_REASON: cause}
            return cause, code
        if self._reason == "abort":
            self._add_event("aborted", {names.CAUSE: "request"})
            return "request", "OK"
        if self._reason == "error":
            timeline.error = "the engine ended an output with an error"
            timeline.attributes[names.ERROR_TYPE] = _ENGINE_ERROR
            return _ENGINE_ERROR, "OK"
        return "", "OK"

    def _add_event(self, name: str, attributes: Mapping[str, Value]) -> None:
        self._timeline.events.append(SpanEvent(name, time_ns(), attributes))


def _without_values(error: ServiceError, cause: str) -> str:
    """What an error tells an operator: messages of what is wrong with a request quote its text."""
    if isinstance(error, InvalidArgument):
        return ": ".join(filter(None, (cause, ", ".join(field for field, _ in error.violations))))
    return cause if isinstance(error, NotFound) else str(error)


def _times_of(states: Sequence[RequestState]) -> dict[str, int | float]:
    """Sums of what happened to the outputs, and the times of the one that spent the most in engines."""
    for state in states:
        state.times.end()
    all_times = [state.times for state in states]
    longest = max(all_times, key=lambda times: sum(times.spent_ns))
    queue_ms, prefill_ms, decode_ms = (round(spent_ns / 1e6, 1) for spent_ns in longest.spent_ns)
    counts = {
        "num_preemptions": sum(times.num_preemptions for times in all_times),
        "num_migrations": max(times.num_migrations for times in all_times),
    }
    num_nan_logits = sum(times.num_nan_logits for times in all_times)
    if num_nan_logits:
        counts["num_nan_logits"] = num_nan_logits
    return {"queue_ms": queue_ms, "prefill_ms": prefill_ms, "decode_ms": decode_ms, **counts}
