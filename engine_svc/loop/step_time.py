"""Estimates how long steps may take, which the loop announces: the only judgement of when a step hangs.

Knows no clock and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from engine_svc.core.step import StepPlan

# Estimates are for the slowest such step: caches may be cold and other processes may use the processor.
_MARGIN = 4.0
# For the first step, and for one far larger than any before: kernels may have to be compiled.
_FIRST_BUDGET_S = 60.0
_FAR_BUCKETS = 3
_MAX_BUCKETS = 32
# Applied to the slowest step of a size with each further step, so that a slow step is forgotten over time.
_FADING = 0.99
_NUM_RECENT = 512
_P99_INTERVAL = 64
_P99_FACTOR = 10.0
# A call between two steps may read all weights from a slow disk.
_CALL_BUDGET_S = 600.0


@dataclass(frozen=True, slots=True)
class _Size:
    """A step's size, which decides its time. num_reads: known tokens attended to, over all of its tokens."""

    num_tokens: int
    num_reads: int


@dataclass(frozen=True, slots=True)
class _Slowest:
    """The slowest step of about one size, fading over time."""

    seconds: float
    size: _Size

    def scaled_to(self, size: _Size) -> float:
        """The time that a larger step would take."""
        tokens = size.num_tokens / self.size.num_tokens
        reads = size.num_reads / max(1, self.size.num_reads)
        return self.seconds * max(1.0, tokens, reads)


class StepTimeEstimator:
    """Time budget of what the engine thread runs: steps in flight, estimated from earlier ones, or a call.

    Belongs to the engine thread.
    """

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s  # the least that is announced
        self._in_flight: deque[tuple[_Size, float]] = deque()
        self._slowest: list[_Slowest | None] = [None] * _MAX_BUCKETS  # by the length of num_tokens in bits
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_steps = 0
        self._p99_s = 0.0
        self.is_in_call = False
        # When the call began; else when the oldest step in flight began or the step before it ended.
        self.running_since: float | None = None
        self.budget_s = usual_s  # of the call or of all steps in flight

    def begin(self, plan: StepPlan, now: float) -> None:
        """A step is about to be launched."""
        size = _size_of(plan)
        self._in_flight.append((size, self._budget(size)))
        if self.running_since is None:
            self.running_since = now
        self._add_up()

    def end(self, now: float) -> None:
        """The oldest step in flight has ended."""
        size, _ = self._in_flight.popleft()
        if self.running_since is not None and size.num_tokens:
            self._note(size, now - self.running_since)
        self.running_since = now if self._in_flight else None
        self._add_up()

    def begin_call(self, now: float) -> None:
        """A call begins. Its time does not count for the steps in flight."""
        self.is_in_call, self.running_since = True, now
        self.budget_s = max(self._usual_s, _CALL_BUDGET_S)

    def end_call(self, now: float) -> None:
        """The call has ended; steps in flight count from now on."""
        self.is_in_call, self.running_since = False, now if self._in_flight else None
        self._add_up()

    def drop(self) -> None:
        """Forget the steps in flight, which have failed."""
        self._in_flight.clear()
        self.running_since = None
        self._add_up()

    def _note(self, size: _Size, seconds: float) -> None:
        bucket = _bucket_of(size)
        slowest = self._slowest[bucket]
        if slowest is None or seconds >= slowest.seconds * _FADING:
            self._slowest[bucket] = _Slowest(seconds, size)
        else:
            self._slowest[bucket] = _Slowest(slowest.seconds * _FADING, slowest.size)
        self._recent.append(seconds)
        self._num_steps += 1
        if self._num_steps % _P99_INTERVAL == 0:
            self._p99_s = sorted(self._recent)[len(self._recent) * 99 // 100]

    def _budget(self, size: _Size) -> float:
        """The time that a step may take, or 0 if that is no longer than usual."""
        if not size.num_tokens:
            return 0.0
        budget_s = _P99_FACTOR * self._p99_s
        nearest, distance = self._nearest(_bucket_of(size))
        if nearest is not None:
            budget_s = max(budget_s, _MARGIN * nearest.scaled_to(size))
        if nearest is None or distance >= _FAR_BUCKETS:
            budget_s = max(budget_s, _FIRST_BUDGET_S)
        return budget_s if budget_s > self._usual_s else 0.0

    def _nearest(self, bucket: int) -> tuple[_Slowest | None, int]:
        """The slowest step of this size, else of the nearest smaller, else of the nearest larger size."""
        for other_bucket in (*range(bucket, -1, -1), *range(bucket + 1, _MAX_BUCKETS)):
            slowest = self._slowest[other_bucket]
            if slowest is not None:
                return slowest, max(0, bucket - other_bucket)
        return None, 0

    def _add_up(self) -> None:
        self.budget_s = max(self._usual_s, sum(budget_s for _, budget_s in self._in_flight))


def _size_of(plan: StepPlan) -> _Size:
    num_tokens = plan.total_num_tokens
    computed: Sequence[int] = plan.num_computed_tokens
    if num_tokens == len(computed):
        return _Size(num_tokens, sum(computed) + num_tokens)
    reads = sum(map(mul, plan.num_tokens, computed))
    return _Size(num_tokens, reads + sum(map(mul, plan.num_tokens, plan.num_tokens)))


def _bucket_of(size: _Size) -> int:
    return min(size.num_tokens.bit_length(), _MAX_BUCKETS - 1)
