"""How long blocks should stay for the next turn of their job. Knows no clock, no blocks and no request."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """What a pin is worth at this time.

    saved_s: seconds that the job's next turn ends sooner if its blocks are there.
    cost_s: seconds that others end later, for each second of the pin.
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
    """The time at which the expected gain is greatest: P(gap <= time) * saved_s - time * cost_s."""

    def ttl_s(self, gaps: Sequence[float], value: PinValue) -> float:
        if len(gaps) >= MIN_SEEN:
            return _best_seen(gaps, value)
        return _best_exponential(sum(gaps) / len(gaps) if gaps else FIRST_GAP_S, value)


def _best_seen(gaps: Sequence[float], value: PinValue) -> float:
    best_s, most = 0.0, 0.0
    # One gap more than there were is longer than all of them.
    share = value.saved_s / (len(gaps) + 1)
    # Of equal gaps the last counts.
    pairs = enumerate(pairwise((*gaps, math.inf)), start=1)
    ends = [rank for rank, (gap_s, later) in pairs if later > gap_s]
    for rank in ends:
        ttl_s = min(gaps[rank - 1] * _LATE_FACTOR + _LATE_S, MAX_TTL_S)
        gain = rank * share - ttl_s * value.cost_s
        if gain > most:
            best_s, most = ttl_s, gain
    return best_s


def _best_exponential(mean_s: float, value: PinValue) -> float:
    mean_s = max(mean_s, 1e-3)
    cost = value.cost_s * mean_s
    if value.saved_s <= cost:
        return 0.0
    longest_s = _TAIL * mean_s
    ttl_s = min(longest_s, mean_s * math.log(value.saved_s / cost)) if cost else longest_s
    return min(ttl_s, MAX_TTL_S)


class StepSeconds:
    """The time of a step by its number of tokens: a line through the steps, older ones counting less."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        self._count = self._count * _FADING + 1
        self._x = self._x * _FADING + num_tokens
        self._y = self._y * _FADING + seconds
        self._xx = self._xx * _FADING + num_tokens * num_tokens
        self._xy = self._xy * _FADING + num_tokens * seconds

    @property
    def per_token(self) -> float:
        """Seconds that one token more takes; 0 before any step."""
        spread = self._count * self._xx - self._x * self._x
        # Steps of one size say nothing of another.
        if spread <= 1e-9 * self._count * self._xx:
            return self._y / self._x if self._x else 0.0
        return max(0.0, (self._count * self._xy - self._x * self._y) / spread)
