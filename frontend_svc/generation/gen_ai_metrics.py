"""Metrics by OpenTelemetry's GenAI conventions, with their buckets, of generation requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns

from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.metrics import Metrics

# Upper bounds by open-telemetry/semantic-conventions, docs/gen-ai/gen-ai-metrics.md.
REQUEST_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
USAGE_BUCKETS = tuple(4**power for power in range(14))

_LABELS = (names.OPERATION_NAME, names.PROVIDER_NAME, names.REQUEST_MODEL, names.RESPONSE_MODEL)


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival. model: "" until it is known, as texts of clients are no labels.

    is_answered: whether the client has got the end of all outputs.

    per_output_token_s: mean time between the tokens of an output, for each output with several.
    error_type: "" for a successful request.
    """

    operation: str
    model: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    per_output_token_s: list[float] = field(default_factory=list)
    error_type: str = ""
    is_answered: bool = False
    began_at_ns: int = field(default_factory=perf_counter_ns)


class GenAIMetrics:
    """Counts each request once, when it has ended. Times to and between tokens are of successful ones."""

    def __init__(self, metrics: Metrics) -> None:
        self._duration = metrics.conventional_histogram(
            "gen_ai.server.request.duration",
            "Duration of a request; with error_type if it failed or was aborted.",
            REQUEST_BUCKETS,
            unit="s",
            labels=(*_LABELS, names.ERROR_TYPE),
        )
        self._first_token = metrics.conventional_histogram(
            "gen_ai.server.time_to_first_token",
            "Time from a successful request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS,
            unit="s",
            labels=_LABELS,
        )
        self._per_output_token = metrics.conventional_histogram(
            "gen_ai.server.time_per_output_token",
            "Mean time between the tokens of an output of a successful request.",
            PER_TOKEN_BUCKETS,
            unit="s",
            labels=_LABELS,
        )
        self._usage = metrics.conventional_histogram(
            "gen_ai.client.token.usage",
            "Tokens of a request's prompt (input) and of all its outputs (output).",
            USAGE_BUCKETS,
            unit="{token}",
            labels=(*_LABELS, names.TOKEN_TYPE),
        )

    def add(self, record: RequestRecord) -> None:
        labels = (record.operation, names.PROVIDER, record.model, record.model)
        duration_s = (perf_counter_ns() - record.began_at_ns) / 1e9
        self._duration.of(*labels, record.error_type).observe(duration_s)
        if record.model:
            self._usage.of(*labels, "input").observe(record.num_input_tokens)
            self._usage.of(*labels, "output").observe(record.num_output_tokens)
        if record.error_type or record.first_token_s is None:
            return
        self._first_token.of(*labels).observe(record.first_token_s)
        for seconds in record.per_output_token_s:
            self._per_output_token.of(*labels).observe(seconds)
