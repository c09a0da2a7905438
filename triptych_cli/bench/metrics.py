"""Computes metrics from timestamps: latencies, their distributions, throughput, goodput. Knows no server."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

OK = "OK"
_LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(slots=True)
class Timeline:
    """Timestamps of one request, in seconds of one monotonic clock.

    `token_times[i]` is when a message with `token_counts[i]` > 0 tokens came. `code` is the name of a status,
    OK only for a complete output, and empty while the request has not ended.
    """

    due_at: float
    sent_at: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    ended_at: float = math.nan
    code: str = ""
    message: str = ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens received."""
        return sum(self.token_counts)

    @property
    def lateness_ms(self) -> float:
        """How late the request was sent, which is the load generator's own delay."""
        return max(0.0, (self.sent_at - self.due_at) * 1000)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: from sending to the first message with tokens."""
        return (self.token_times[0] - self.sent_at) * 1000 if self.token_times else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for less than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) * 1000 / (self.num_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        """Inter-token latencies: gaps between messages with tokens, one for each message but the first."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return [(later - earlier) * 1000 for earlier, later in pairs]

    @property
    def e2e_ms(self) -> float:
        """From sending to the end of the output."""
        return (self.ended_at - self.sent_at) * 1000


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Latency bounds of a good request; None is no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Parse bounds such as `ttft_ms=200`; raises ValueError."""
        bounds: dict[str, float] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if name not in _LATENCIES or not equals:
                raise ValueError(
                    f"slo {text!r} is not one of {', '.join(f'{each}=MS' for each in _LATENCIES)}"
                )
            if name in bounds:
                raise ValueError(f"slo {name} is given twice")
            try:
                bounds[name] = float(value)
            except ValueError as error:
                raise ValueError(f"slo {text!r}: {value!r} is not a number") from error
            if not 0 < bounds[name] < math.inf:
                raise ValueError(f"slo {text!r}: the bound must be above 0 and finite")
        return cls(**bounds)

    def is_met(self, timeline: Timeline) -> bool:
        """Whether a completed request met every bound; a single token has no time per token to check."""
        seen = (timeline.ttft_ms, timeline.tpot_ms, timeline.e2e_ms)
        bounds = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return all(
            value is None or bound is None or value <= bound
            for value, bound in zip(seen, bounds, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one quantity; percentiles are interpolated linearly, `std` is the population's."""

    mean: float
    median: float
    p90: float
    p99: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """The distribution of values; None without values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            mean=statistics.fmean(ordered),
            median=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            std=statistics.pstdev(ordered),
            min=ordered[0],
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a run. Rates count completed requests over `duration_s`, from first sending to last end."""

    num_completed: int
    num_failed: int
    num_interrupted: int
    failures: dict[str, int]  # by status code
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_message: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_requests_per_s: float | None  # None without bounds
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    lateness_ms: Distribution | None


def summarize(timelines: Sequence[Timeline], level: ServiceLevel | None = None) -> Summary:
    """The metrics of all requests that were sent."""
    done = [each for each in timelines if each.code == OK]
    failures = Counter(each.code for each in timelines if each.code not in ("", OK))
    ends = [each.ended_at for each in timelines if not math.isnan(each.ended_at)]
    duration_s = max(ends) - min(each.sent_at for each in timelines) if ends else 0.0
    num_prompt = sum(each.num_prompt_tokens for each in done)
    num_output = sum(each.num_tokens for each in done)
    num_messages = sum(len(each.token_times) for each in done)
    num_good = sum(level.is_met(each) for each in done) if level else 0

    def rate(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Summary(
        num_completed=len(done),
        num_failed=failures.total(),
        num_interrupted=sum(each.code == "" for each in timelines),
        failures=dict(sorted(failures.items())),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(each.num_cached_tokens for each in done),
        num_output_tokens=num_output,
        tokens_per_message=num_output / num_messages if num_messages else 0.0,
        requests_per_s=rate(len(done)),
        output_tokens_per_s=rate(num_output),
        total_tokens_per_s=rate(num_prompt + num_output),
        goodput_requests_per_s=rate(num_good) if level else None,
        ttft_ms=Distribution.of([each.ttft_ms for each in done if each.ttft_ms is not None]),
        tpot_ms=Distribution.of([each.tpot_ms for each in done if each.tpot_ms is not None]),
        itl_ms=Distribution.of([gap for each in done for gap in each.itls_ms]),
        e2e_ms=Distribution.of([each.e2e_ms for each in done]),
        lateness_ms=Distribution.of([each.lateness_ms for each in timelines]),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of the ascending `ordered`, interpolated linearly."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
