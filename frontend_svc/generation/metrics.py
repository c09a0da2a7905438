"""Counts and times of generation requests, as their clients see them. Knows no engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time_ns
from typing import NamedTuple, Protocol

from frontend_svc.generation.caller import Caller
from frontend_svc.generation.gen_ai_metrics import GenAIMetrics, RequestRecord
from frontend_svc.output.collector import EndReason
from frontend_svc.output.engine_times import EngineTimes
from frontend_svc.output.request_state import RequestState
from triptych_kit.errors import DeadlineExceeded, ServiceError
from triptych_kit.telemetry.metrics import Counts, Distribution, Metrics

# Upper bounds in seconds.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20,
    40, 80,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip
TEXT_BUCKETS = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
BOUNDARY_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# Upper bounds in tokens.
LENGTH_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))

_FINISHED = tuple(reason.name.lower() for reason in EndReason)
# First tokens between two calls of `drain_first_tokens`, of which the last are kept.
_MAX_FIRST_TOKENS = 4096
# client: it cancelled or has gone.  request: by an Abort call, or in the engine.
_ABORTED = ("client", "deadline", "slow_consumer", "request")


# Upper bounds in outputs.
OUTPUTS_BUCKETS = (1, 2, 5, 10, 20, 50, 100)

_MODEL = ("model_name",)
# Of prompt tokens: by the engine, which computed them, or had them in its prefix cache. Names are vLLM's.
_SOURCES = ("local_compute", "local_cache_hit")


class _Histogram(NamedTuple):
    name: str
    help: str
    buckets: Sequence[float]
    aliases: tuple[str, ...] = ()


class _Counter(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...] = ()
    zeros: Sequence[tuple[str]] = ()
    aliases: tuple[str, ...] = ()


# By field of `RequestCounts`.
_COUNTERS = {
    "received": _Counter("triptych_frontend_requests_total", "Generation requests that arrived."),
    "errors": _Counter(
        "triptych_frontend_request_errors_total",
        "Generation requests that were refused or ended with an error, by gRPC status code.",
        ("code",), zeros=[(error.code.name,) for error in ServiceError.__subclasses__()],
    ),
    "aborted": _Counter(
        "triptych_frontend_requests_aborted_total",
        "Generation requests that ended early: client, deadline, slow_consumer, request (an Abort call).",
        ("cause",), zeros=[(cause,) for cause in _ABORTED],
    ),
    "adopted": _Counter(
        "triptych_frontend_requests_adopted_total",
        "Requests of other frontends that were continued here for their clients; counted nowhere else.",
    ),
    "finished": _Counter(
        "triptych_frontend_outputs_finished_total", "Outputs that ended, one for each of a request's n.",
        (*_MODEL, "finished_reason"), aliases=("vllm:request_success_total",),
    ),
    "prompt_tokens": _Counter(
        "triptych_frontend_prompt_tokens_total", "Prompt tokens of requests that were sent to engines.",
        _MODEL, aliases=("vllm:prompt_tokens_total",),
    ),
    "cached_tokens": _Counter(
        "triptych_frontend_cached_prompt_tokens_total", "Prompt tokens that came from a prefix cache.",
        _MODEL, aliases=("vllm:prompt_tokens_cached_total",),
    ),
    "prompt_tokens_by_source": _Counter(
        "triptych_frontend_prompt_tokens_by_source_total",
        "Prompt tokens of requests with a first token: local_compute, or local_cache_hit, of a prefix cache.",
        (*_MODEL, "source"), aliases=("vllm:prompt_tokens_by_source_total",),
    ),
}  # fmt: skip

# By field of `ModelMetrics`.
_HISTOGRAMS = {
    "first_token": _Histogram(
        "triptych_frontend_time_to_first_token_seconds", "Time from a request's arrival to its first token.",
        FIRST_TOKEN_BUCKETS, ("vllm:time_to_first_token_seconds",),
    ),
    "inter_token": _Histogram(
        "triptych_frontend_inter_token_latency_seconds",
        "Time between two tokens of an output. Tokens that arrive together share the time before them.",
        # The first is the older name of the second.
        TOKEN_BUCKETS, ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
    ),
    "per_output_token": _Histogram(
        "triptych_frontend_time_per_output_token_seconds",
        "Mean time between the tokens of an output, one value an output.",
        TOKEN_BUCKETS, ("vllm:request_time_per_output_token_seconds",),
    ),
    "duration": _Histogram(
        "triptych_frontend_request_duration_seconds", "Time from a request's arrival to its last token.",
        REQUEST_BUCKETS, ("vllm:e2e_request_latency_seconds",),
    ),
    "queue": _Histogram(
        "triptych_frontend_request_queue_seconds",
        "Time of an output in queues of engines, again after a move or a preemption included.",
        REQUEST_BUCKETS, ("vllm:request_queue_time_seconds",),
    ),
    "prefill": _Histogram(
        "triptych_frontend_request_prefill_seconds",
        "Time of an output in engines from being scheduled to its first token there.",
        REQUEST_BUCKETS, ("vllm:request_prefill_time_seconds",),
    ),
    "decode": _Histogram(
        "triptych_frontend_request_decode_seconds",
        "Time of an output in engines from its first token there to its last.",
        REQUEST_BUCKETS, ("vllm:request_decode_time_seconds",),
    ),
    "inference": _Histogram(
        "triptych_frontend_request_inference_seconds", "Time of an output in prefill and decode.",
        REQUEST_BUCKETS, ("vllm:request_inference_time_seconds",),
    ),
    "num_prompt_tokens": _Histogram(
        "triptych_frontend_request_prompt_tokens", "Prompt tokens of a request.",
        LENGTH_BUCKETS, ("vllm:request_prompt_tokens",),
    ),
    "num_output_tokens": _Histogram(
        "triptych_frontend_output_tokens", "Tokens of an output that ended.",
        LENGTH_BUCKETS, ("vllm:request_generation_tokens",),
    ),
    "max_output_tokens": _Histogram(
        "triptych_frontend_request_max_output_tokens", "Tokens of a request's longest output.",
        LENGTH_BUCKETS, ("vllm:request_max_num_generation_tokens",),
    ),
    "num_computed_tokens": _Histogram(
        "triptych_frontend_request_computed_prompt_tokens",
        "Prompt tokens of a request with a first token that no prefix cache had.",
        LENGTH_BUCKETS, ("vllm:request_prefill_kv_computed_tokens",),
    ),
    "n": _Histogram(
        "triptych_frontend_request_n", "Outputs that a request asks for, n.",
        OUTPUTS_BUCKETS, ("vllm:request_params_n",),
    ),
    "max_tokens": _Histogram(
        "triptych_frontend_request_max_tokens", "The max_tokens of a request, with the default filled in.",
        LENGTH_BUCKETS, ("vllm:request_params_max_tokens",),
    ),
}  # fmt: skip

_BOUNDARY = _Histogram(
    "triptych_frontend_engine_boundary_seconds",
    "Time of a request on the way to the engine and of its first answer on the way back.",
    BOUNDARY_BUCKETS,
)
_TOKENIZE = _Histogram(
    "triptych_frontend_tokenize_seconds",
    "Time to check and tokenize a request, the wait for a text worker included.",
    TEXT_BUCKETS,
)
_DETOKENIZE = _Histogram(
    "triptych_frontend_detokenize_seconds",
    "Time to turn the tokens of an output into text, stop strings and logprobs included.",
    TEXT_BUCKETS,
)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Events of all requests. The labels are names of models, which engines give, and words of this file."""

    received: Counts
    errors: Counts
    aborted: Counts
    adopted: Counts
    finished: Counts
    prompt_tokens: Counts
    cached_tokens: Counts
    prompt_tokens_by_source: Counts


@dataclass(slots=True)
class ModelMetrics:
    """Tokens and times of the requests for one model."""

    name: str
    first_tokens_s: deque[float]  # of all models, as they come
    first_token: Distribution
    inter_token: Distribution
    per_output_token: Distribution
    duration: Distribution
    queue: Distribution
    prefill: Distribution
    decode: Distribution
    inference: Distribution
    num_prompt_tokens: Distribution
    num_output_tokens: Distribution
    max_output_tokens: Distribution
    num_computed_tokens: Distribution
    n: Distribution
    max_tokens: Distribution
    generated_tokens: int = field(default=0, init=False)


class RequestMetrics:
    """Registers and keeps the metrics of all requests of this process."""

    def __init__(self, metrics: Metrics) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self._first_tokens_s: deque[float] = deque(maxlen=_MAX_FIRST_TOKENS)
        self.counts = RequestCounts(
            **{name: metrics.counts(**row._asdict()) for name, row in _COUNTERS.items()}
        )
        metrics.counter(
            "triptych_frontend_generated_tokens_total",
            "Tokens of all outputs.",
            lambda: {(name,): model.generated_tokens for name, model in self._models.items()},
            labels=_MODEL,
            aliases=("vllm:generation_tokens_total",),
        )
        self._histograms = {
            name: metrics.histogram(**row._asdict(), labels=_MODEL) for name, row in _HISTOGRAMS.items()
        }
        self._gen_ai = GenAIMetrics(metrics)
        self._boundary, self._tokenize, self._detokenize = (
            metrics.histogram(**row._asdict()).of() for row in (_BOUNDARY, _TOKENIZE, _DETOKENIZE)
        )

    def of(self, name: str) -> ModelMetrics:
        """Metrics of the model `name`, which appear at zero from then on."""
        model = self._models.get(name)
        if model is None:
            distributions = {field: histogram.of(name) for field, histogram in self._histograms.items()}
            model = self._models[name] = ModelMetrics(name, self._first_tokens_s, **distributions)
            for counts in (self.counts.prompt_tokens, self.counts.cached_tokens):
                counts.add(name, by=0)
            for source in _SOURCES:
                self.counts.prompt_tokens_by_source.add(name, source, by=0)
            for reason in _FINISHED:
                self.counts.finished.add(name, reason, by=0)
        return model

    @property
    def num_generated_tokens(self) -> int:
        return sum(model.generated_tokens for model in self._models.values())

    def drain_first_tokens(self) -> list[float]:
        """The times to the first tokens since the last call, in seconds; of very many the last ones."""
        times_s = list(self._first_tokens_s)
        self._first_tokens_s.clear()
        return times_s

    @contextmanager
    def counted(self, caller: Caller, operation: str) -> Iterator[RequestRecord]:
        """Count a request that arrives, and the error with which it ends."""
        if not caller.is_repeat:
            self.counts.received.add()
        record, is_over = RequestRecord(operation), True
        try:
            yield record
        except (asyncio.CancelledError, GeneratorExit):
            if not record.is_answered:
                record.error_type = record.error_type or "CANCELLED"
            raise
        except ServiceError as error:
            is_over = not caller.is_repeated(error)
            record.error_type = error.code.name
            if is_over:
                self.counts.errors.add(error.code.name)
            raise
        except BaseException:
            record.error_type = "INTERNAL"
            self.counts.errors.add("INTERNAL")
            raise
        finally:
            if is_over:
                self._gen_ai.add(record)

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        started_at_ns = time_ns()
        yield
        self._tokenize.observe((time_ns() - started_at_ns) / 1e9)

    @contextmanager
    def timed(
        self, request: MeteredRequest, record: RequestRecord, *, age_s: float, is_late: Callable[[], bool]
    ) -> Iterator[None]:
        """Count a request that is sent inside of the block, and its outputs. age_s: since it arrived."""
        model = self.of(request.model)
        self.counts.prompt_tokens.add(model.name, by=request.num_prompt_tokens)
        model.num_prompt_tokens.observe(request.num_prompt_tokens)
        model.n.observe(len(request.states))
        model.max_tokens.observe(request.max_tokens)
        record.model, record.num_input_tokens = model.name, request.num_prompt_tokens
        meter = request.meter = OutputMeter(model, time_ns() - int(age_s * 1e9))
        for state in request.states:
            state.meter = meter
        reason, cause = "abort", ""
        try:
            yield
            cause = "request" if "abort" in meter.reasons.values() else ""
        except (asyncio.CancelledError, GeneratorExit):
            cause = "deadline" if is_late() else "client"
            raise
        except BaseException as error:
            reason, cause = "error", _cause_of(error)
            raise
        finally:
            self._end(request, meter, record, reason, cause)

    def _end(
        self, request: MeteredRequest, meter: OutputMeter, record: RequestRecord, reason: str, cause: str
    ) -> None:
        """reason: of outputs whose end the client has not got. cause: of an early end."""
        model, states, has_all = meter.model, request.states, len(meter.reasons) == len(request.states)
        for index, state in enumerate(states):
            self.counts.finished.add(model.name, meter.reasons.get(index, reason))
            num_tokens = state.num_output_tokens
            model.num_output_tokens.observe(num_tokens)
            if num_tokens > 1:
                between_ns = state.last_output_at_ns - state.first_output_at_ns
                per_output_token_s = between_ns / 1e9 / (num_tokens - 1)
                model.per_output_token.observe(per_output_token_s)
                record.per_output_token_s.append(per_output_token_s)
            record.num_output_tokens += num_tokens
            self._detokenize.observe(state.detokenize_ns / 1e9)
            state.times.end()
            self._observe_times(model, state.times)
        model.max_output_tokens.observe(max(state.num_output_tokens for state in states))
        num_cached = request.num_cached_tokens
        self.counts.cached_tokens.add(model.name, by=num_cached)
        record.first_token_s = meter.first_token_s
        if meter.first_token_s is not None:
            by_source = self.counts.prompt_tokens_by_source
            model.num_computed_tokens.observe(request.num_prompt_tokens - num_cached)
            by_source.add(model.name, "local_cache_hit", by=num_cached)
            by_source.add(model.name, "local_compute", by=request.num_prompt_tokens - num_cached)
        record.is_answered = has_all
        if "error" in meter.reasons.values():
            record.error_type = "ENGINE_ERROR"
        if cause and (cause == "request" or not has_all):
            self.counts.aborted.add(cause)
            record.error_type = "DEADLINE_EXCEEDED" if cause == "deadline" else "CANCELLED"
        elif has_all:
            last_at_ns = max(state.last_output_at_ns for state in states)
            model.duration.observe((last_at_ns - meter.arrived_at_ns) / 1e9)

    def _observe_times(self, model: ModelMetrics, times: EngineTimes) -> None:
        queue_s, prefill_s, decode_s = (spent_ns / 1e9 for spent_ns in times.spent_ns)
        model.queue.observe(queue_s)
        model.prefill.observe(prefill_s)
        model.decode.observe(decode_s)
        model.inference.observe(prefill_s + decode_s)
        if times.boundary_ns is not None:
            self._boundary.observe(times.boundary_ns / 1e9)


class MeteredRequest(Protocol):
    """A request and its outputs, whose ends it notes in `meter`."""

    model: str
    states: list[RequestState]
    meter: OutputMeter | None

    @property
    def max_tokens(self) -> int: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...


class OutputMeter:
    """Counts and times the tokens of a request as they arrive. reasons: of ends that its client has got."""

    __slots__ = ("arrived_at_ns", "first_token_s", "model", "reasons")

    def __init__(self, model: ModelMetrics, arrived_at_ns: int) -> None:
        self.model = model
        self.arrived_at_ns = arrived_at_ns
        self.reasons: dict[int, str] = {}
        self.first_token_s: float | None = None  # of the first output that has one

    def note_tokens(self, num_tokens: int, now_ns: int, before_ns: int) -> None:
        """New tokens of one output. before_ns: when those before them arrived; 0: there were none."""
        model = self.model
        model.generated_tokens += num_tokens
        if before_ns:
            model.inter_token.observe((now_ns - before_ns) / 1e9 / num_tokens, num_tokens)
        elif self.first_token_s is None:
            self.first_token_s = (now_ns - self.arrived_at_ns) / 1e9
            model.first_token.observe(self.first_token_s)
            model.first_tokens_s.append(self.first_token_s)


def _cause_of(error: BaseException) -> str:
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    return "slow_consumer" if isinstance(error, ServiceError) and error.reason == "SLOW_READER" else ""
