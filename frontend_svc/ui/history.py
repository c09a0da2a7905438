"""The page /ui/history: the last five minutes of this frontend and its engines, for plots.

Sampled here and not in the browser, so that a page that is opened late has them, too.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from frontend_svc.engines.connection.client import EngineState
from frontend_svc.parts import EngineParts, RequestParts
from triptych_kit.clock import Clock
from triptych_kit.http.pages import Page

SPAN_S = 300.0
_INTERVAL_S = 1.0
# Quantiles are those of the first tokens of the last samples: in one second there may be none.
_NUM_SAMPLES_OF_QUANTILES = 10
_COUNTED_STATES = frozenset({EngineState.READY, EngineState.DRAINING})


@dataclass(frozen=True, slots=True)
class Sample:
    """Rates and first tokens of this frontend's requests; the load of all engines. None: there is none."""

    tokens_per_s: float
    running: int
    waiting: int
    first_token_p50_ms: float | None
    first_token_p95_ms: float | None
    kv_use: float | None


class History:
    """A sample every `interval_s`, of which those of the last `span_s` are kept."""

    def __init__(
        self,
        engines: EngineParts,
        requests: RequestParts,
        clock: Clock,
        *,
        interval_s: float = _INTERVAL_S,
        span_s: float = SPAN_S,
    ) -> None:
        self._engines = engines
        self._requests = requests
        self._clock = clock
        self._interval_s = interval_s
        self._span_s = span_s
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=math.ceil(span_s / interval_s) + 1)
        self._first_tokens_s: deque[list[float]] = deque(maxlen=_NUM_SAMPLES_OF_QUANTILES)
        self._sampled_at = clock.now()
        self._num_generated = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self.start()
        self.sample()

    def sample(self) -> None:
        """Keep the state of this moment."""
        metrics, now = self._requests.metrics, self._clock.now()
        num_generated, passed_s = metrics.num_generated_tokens, now - self._sampled_at
        num_new = num_generated - self._num_generated
        self._sampled_at, self._num_generated = now, num_generated
        self._first_tokens_s.append(metrics.drain_first_tokens())
        first_tokens_s = sorted(each for part in self._first_tokens_s for each in part)
        clients = self._engines.directory.clients()
        infos = [client.requests.account.info() for client in clients if client.state in _COUNTED_STATES]
        num_blocks = sum(info.num_total_blocks for info in infos)
        sample = Sample(
            tokens_per_s=round(num_new / passed_s, 1) if passed_s > 0 else 0.0,
            running=sum(info.num_running for info in infos),
            waiting=sum(info.num_waiting for info in infos),
            first_token_p50_ms=_quantile_ms(first_tokens_s, 0.5),
            first_token_p95_ms=_quantile_ms(first_tokens_s, 0.95),
            kv_use=round(sum(info.num_used_blocks for info in infos) / num_blocks, 4) if num_blocks else None,
        )
        self._samples.append((now, sample))

    async def make(self, target: str) -> Page:
        """The page: a column for each value, the oldest sample first, and how long ago each was taken."""
        now = self._clock.now()
        kept = [
            (round((now - at) * 1000), sample) for at, sample in self._samples if now - at <= self._span_s
        ]
        rows = [asdict(sample) for _, sample in kept]
        columns = {name: [row[name] for row in rows] for name in Sample.__dataclass_fields__}
        content = {"span_ms": round(self._span_s * 1000), "age_ms": [age_ms for age_ms, _ in kept], **columns}
        return Page(json.dumps(content, separators=(",", ":")).encode(), "application/json")


def _quantile_ms(ordered_s: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed."""
    if not ordered_s:
        return None
    return round(ordered_s[math.ceil(share * len(ordered_s)) - 1] * 1000, 2)
