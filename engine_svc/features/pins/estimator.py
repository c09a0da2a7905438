"""How long blocks should stay for the next turn of their job. Knows no clock, no blocks and no request."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Sources of gaps, the least recently used is forgotten, and gaps of each.
MAX_SOURCES = 4096
MAX_GAPS = 128
# From this number on the distribution of gaps is that which was seen; before, an exponential one.
MIN_SEEN = 8
# A gap without any that was seen before.
FIRST_GAP_S = 1.0
MAX_TTL_S = 300.0
# Turns are a little late now and then.
_LATE_FACTOR, _LATE_S = 1.1, 0.05
# 95 % of an exponential distribution are within three times its mean.
_TAIL = 3.0
# Of steps, by which older ones count less.
_FADING = 0.995


class Gaps:
    """The newest gaps of one source, in seconds."""

    __slots__ = ("_newest", "ascending")

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self.ascending: list[float] = []

    def add(self, gap_s: float) -> None:
        if len(self._newest) == MAX_GAPS:
            self.ascending.remove(self._newest.popleft())
        self._newest.append(gap_s)
        insort(self.ascending, gap_s)


class ToolGaps:
    """Gaps from the end of a turn to the arrival of the job's next one: by tool over all jobs, and by job."""

    def __init__(self, max_sources: int = MAX_SOURCES) -> None:
        self._max_sources = max_sources
        self._by_source: OrderedDict[tuple[str, str], Gaps] = OrderedDict()

    def add(self, job: str, tool: str, gap_s: float) -> None:
        """tool: that ran meanwhile; "": not known."""
        sources = [("job", job), ("tool", tool)] if tool else [("job", job)]
        for source in sources:
            self._by_source.setdefault(source, Gaps()).add(gap_s)
            self._by_source.move_to_end(source)
        while len(self._by_source) > self._max_sources:
            self._by_source.popitem(last=False)

    def expected(self, job: str, tool: str) -> Sequence[float]:
        """The gaps, in ascending order, by which the next one of this job is expected.

        Those of its tool, if that was seen often enough; else the more of the tool's and the job's.
        """
        of_tool = self._ascending("tool", tool) if tool else ()
        if len(of_tool) >= MIN_SEEN:
            return of_tool
        return max(of_tool, self._ascending("job", job), key=len)

    def _ascending(self, kind: str, name: str) -> Sequence[float]:
        gaps = self._by_source.get((kind, name))
        return () if gaps is None else gaps.ascending


@dataclass(frozen=True, slots=True)
class PinValue:
    """The value of a pin at this time, in seconds of steps.

    saved_s: that the job's next turn takes less if its blocks are there.
    cost_s: that others' requests take more, for each second of the pin.
    """

    saved_s: float
    cost_s: float


class TtlRule(Protocol):
    """A rule for how long a pin lasts."""

    def ttl_s(self, gaps: Sequence[float], value: PinValue) -> float:
        """The time in seconds; 0: no pin. gaps: in ascending order."""
        ...


@dataclass(frozen=True, slots=True)
class FixedTtl:
    """The same time for every pin."""

    seconds: float

    def ttl_s(self, gaps: Sequence[float], value: PinValue) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class LogNormalTtl:
    """The same time for every pin, none where the median of a log-normal distribution is above a limit."""

    seconds: float
    max_gap_s: float

    def ttl_s(self, gaps: Sequence[float], value: PinValue) -> float:
        if gaps:
            mean_log = sum(math.log(max(gap_s, 1e-3)) for gap_s in gaps) / len(gaps)
            if math.exp(mean_log) > self.max_gap_s:
                return 0.0
        return self.seconds


@dataclass(frozen=True, slots=True)
class UtilityTtl:
    """The time of the greatest expected gain: P(gap <= time) * saved_s - E(min(gap, time)) * cost_s."""

    def ttl_s(self, gaps: Sequence[float], value: PinValue) -> float:
        if len(gaps) >= MIN_SEEN:
            return _best_seen(gaps, value)
        return _best_exponential(sum(gaps) / len(gaps) if gaps else FIRST_GAP_S, value)


def _best_seen(gaps: Sequence[float], value: PinValue) -> float:
    best_s, best_gain = 0.0, 0.0
    # One gap more than there were is longer than all of them.
    num_gaps = len(gaps) + 1
    waited_s = 0.0  # the sum of the gaps up to the time
    for rank, gap_s in enumerate(gaps, start=1):
        waited_s += gap_s
        ttl_s = min(gap_s * _LATE_FACTOR + _LATE_S, MAX_TTL_S)
        gain = rank * value.saved_s - (waited_s + (num_gaps - rank) * ttl_s) * value.cost_s
        if gain > best_gain:
            best_s, best_gain = ttl_s, gain
    return best_s


def _best_exponential(mean_s: float, value: PinValue) -> float:
    """Each second of it has the same gain as every other, so it lasts to the tail or not at all."""
    if value.saved_s <= value.cost_s * mean_s:
        return 0.0
    return min(_TAIL * max(mean_s, 1e-3), MAX_TTL_S)


class StepSeconds:
    """The time of a step by its number of tokens: a line through the steps, older ones counting less."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self._parts = 0.0  # of a step for each of its rows

    def note(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        self._count = self._count * _FADING + 1
        self._x = self._x * _FADING + num_tokens
        self._y = self._y * _FADING + seconds
        self._xx = self._xx * _FADING + num_tokens * num_tokens
        self._xy = self._xy * _FADING + num_tokens * seconds
        self._parts = self._parts * _FADING + 1 / num_rows

    @property
    def per_token(self) -> float:
        """Seconds that one token more takes; 0 before any step."""
        spread = self._count * self._xx - self._x * self._x
        # Steps of one size say nothing of another.
        if spread <= 1e-9 * self._count * self._xx:
            return self._y / self._x if self._x else 0.0
        return max(0.0, (self._count * self._xy - self._x * self._y) / spread)

    @property
    def saved_per_row(self) -> float:
        """Share of the time that a further row in each step saves, as rows share the fixed part of a step."""
        if not self._y:
            return 0.0
        base_s = max(0.0, self._y - self.per_token * self._x) / self._count
        return base_s * self._parts / self._y
