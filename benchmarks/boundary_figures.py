"""What the rounds of the boundary add up to. Pure; knows no process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import percentile
from benchmarks.report import Row

MAX_CPU_US = 60.0
MAX_RATIO = 1.1
JUDGED_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How an engine and a frontend are joined."""

    loop: str  # thread or child: where the engine's loop is, seen from the server
    server: str  # aio, sync, or zmq: the peer's
    transport: str  # tcp or unix
    experiments: str  # ours or default: what gRPC is told to try

    @property
    def name(self) -> str:
        """As tables and pictures show it."""
        if self.server == "zmq":
            return f"zmq {self.transport}"
        return f"{self.loop} {self.server} {self.transport} {self.experiments}"


@dataclass(frozen=True, slots=True)
class Round:
    """One arrangement at one number of requests, once. Seconds; CPU of all threads of a side."""

    engine_cpu_s: float
    pace_cpu_s: float  # of the same steps in an engine that has nothing to say in them
    frontend_cpu_s: float
    rows_cpu_s: float  # of one step's rows, from columns or structs to their receivers
    num_steps: int
    num_messages: int
    num_bytes: int
    first_output_s: Sequence[float]

    @property
    def engine_us(self) -> float:
        """Microseconds of CPU a step, without keeping the pace."""
        return (self.engine_cpu_s - self.pace_cpu_s) / self.num_steps * 1e6

    @property
    def frontend_us(self) -> float:
        """Microseconds of CPU a step, rows included."""
        return self.frontend_cpu_s / self.num_steps * 1e6

    @property
    def stream_us(self) -> float:
        """Microseconds of CPU a step up to columns, or structs, in the hands of who has the receivers."""
        return self.frontend_us - self.rows_cpu_s * 1e6


def summary(
    arrangement: Arrangement, num_requests: int, rounds: Sequence[Round]
) -> dict[str, str | int | float]:
    """The row of a report: medians over the rounds, the best beside them, times of all rounds together."""
    times_us = sorted(seconds * 1e6 for each in rounds for seconds in each.first_output_s)
    num_steps = sum(each.num_steps for each in rounds)

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 1)

    return {
        "arrangement": arrangement.name,
        "requests": num_requests,
        "engine_us": median([each.engine_us for each in rounds]),
        "engine_best_us": round(min(each.engine_us for each in rounds), 1),
        "pace_us": median([each.pace_cpu_s / each.num_steps * 1e6 for each in rounds]),
        "stream_us": median([each.stream_us for each in rounds]),
        "stream_best_us": round(min(each.stream_us for each in rounds), 1),
        "rows_us": median([each.rows_cpu_s * 1e6 for each in rounds]),
        "first_p50_us": round(percentile(times_us, 50), 1),
        "first_p99_us": round(percentile(times_us, 99), 1),
        "messages_a_step": round(sum(each.num_messages for each in rounds) / num_steps, 2),
        "bytes_a_step": round(sum(each.num_bytes for each in rounds) / num_steps),
    }


def shortfalls(rows: Sequence[Row], ours: Arrangement, peer: Arrangement) -> list[str]:
    """Which promises the rows do not keep, in words; none: all are kept."""
    by_name = {str(row["arrangement"]): row for row in rows if row["requests"] == JUDGED_REQUESTS}
    own, other = by_name[ours.name], by_name[peer.name]
    found = []
    for side, column in (("engine", "engine_us"), ("frontend", "stream_us")):
        if (value := float(str(own[column]))) > MAX_CPU_US:
            found.append(f"{side}: {value:.1f} us of CPU a step, at most {MAX_CPU_US:.0f} are promised")
    ratio = float(str(own["first_p50_us"])) / float(str(other["first_p50_us"]))
    if ratio > MAX_RATIO:
        found.append(f"first output: {ratio:.2f} times that of {peer.name}, at most {MAX_RATIO} are promised")
    return found
