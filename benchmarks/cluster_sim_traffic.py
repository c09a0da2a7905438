"""Requests as a Poisson process with heavy-tailed lengths, in conversations of which some are popular."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cluster_sim_engine import EngineShape, SimulatedEngine, SimulatedRequest

_MAX_PROMPT_TOKENS = 32_768
_CALIBRATION_REQUESTS = 1_500


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """What requests look like."""

    utilization: float = 0.8  # of what an engine that is never idle gets done without prefix hits
    least_prompt_tokens: int = 400  # Pareto of exponent `tail`: with 1.2 one in a hundred is 46 times that
    tail: float = 1.2
    mean_output_tokens: int = 96
    conversations_per_engine: int = 8
    popularity: float = 0.6  # exponent of Zipf's law
    shared_part: float = 0.6  # of the prompt that all requests of a conversation have in common, on average


class Traffic:
    """Draws one request after the other. The same seed gives the same requests whatever becomes of them."""

    def __init__(self, shape: TrafficShape, *, num_engines: int, num_frontends: int, seed: int) -> None:
        self._shape = shape
        self._random = random.Random(seed)
        self._num_frontends = num_frontends
        self._ids = itertools.count()
        num_conversations = shape.conversations_per_engine * num_engines
        self._prefixes = [int(self._length() * shape.shared_part) for _ in range(num_conversations)]
        weights = (1 / (rank + 1) ** shape.popularity for rank in range(num_conversations))
        self._cumulative = list(itertools.accumulate(weights))

    def request(self, now: float) -> SimulatedRequest:
        """The next request, which arrives now at some frontend."""
        draw = self._random.random() * self._cumulative[-1]
        prefix_id = bisect.bisect(self._cumulative, draw)
        num_prefix_tokens = self._prefixes[prefix_id]
        own = max(16, int(self._length() * (1 - self._shape.shared_part)))
        outputs = 1 + int(self._random.expovariate(1 / self._shape.mean_output_tokens))
        return SimulatedRequest(
            request_id=next(self._ids),
            frontend=self._random.randrange(self._num_frontends),
            arrived_at=now,
            num_prompt_tokens=num_prefix_tokens + own,
            num_output_tokens=outputs,
            prefix_id=prefix_id,
            num_prefix_tokens=num_prefix_tokens,
        )

    def gaps(self, per_s: float) -> Iterator[float]:
        """Seconds between one arrival and the next, for ever."""
        while True:
            yield self._random.expovariate(per_s)

    def _length(self) -> float:
        return min(
            _MAX_PROMPT_TOKENS, self._shape.least_prompt_tokens * self._random.paretovariate(self._shape.tail)
        )


def requests_per_s(engine: EngineShape, shape: TrafficShape) -> float:
    """How many such requests one engine gets done in a second when its queue is never empty.

    Their prefixes are all different: a cache makes an engine faster than this.
    """
    traffic = Traffic(shape, num_engines=1, num_frontends=1, seed=0)
    queue = SimulatedEngine(engine)
    for _ in range(_CALIBRATION_REQUESTS):
        request = traffic.request(0.0)
        request.prefix_id = request.request_id
        queue.add(request)
    seconds, num_finished = 0.0, 0
    while queue.num_waiting:
        seconds += queue.begin_step()
        num_finished += len(queue.end_step().finished)
    return num_finished / seconds
