"""The page /ui/history: five minutes of samples, read or not."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from frontend_svc.engines.connection.client import EngineState
from frontend_svc.engines.routing.account import EngineAccount, LoadReport
from frontend_svc.generation.metrics import OutputMeter, RequestMetrics
from frontend_svc.ui.history import History
from triptych_kit.clock import FakeClock
from triptych_kit.telemetry.metrics import Metrics

MS = 1_000_000


class Rig:
    """A history of a frontend with two engines, whose samples a test takes."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock(50.0)
        self.metrics = RequestMetrics(Metrics("frontend"))
        self.clients = [
            SimpleNamespace(state=EngineState.READY, requests=SimpleNamespace(account=EngineAccount(name)))
            for name in ("a", "b")
        ]
        engines: Any = SimpleNamespace(directory=SimpleNamespace(clients=lambda: self.clients))
        requests: Any = SimpleNamespace(metrics=self.metrics)
        self.history = History(engines, requests, self.clock, **options)

    def report(self, index: int, **load: int) -> None:
        self.clients[index].requests.account.report(LoadReport(1, 1, **load), is_direct=True)

    def first_token(self, after_ms: int, num_tokens: int = 1) -> None:
        OutputMeter(self.metrics.of("tiny"), 0).note_tokens(num_tokens, after_ms * MS, 0)

    def sample_after(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.history.sample()

    async def content(self) -> dict[str, Any]:
        page = await self.history.make("/ui/history")
        assert page.content_type == "application/json"
        return json.loads(page.body)


async def test_a_sample_has_the_load_of_all_engines_and_the_rate_since_the_one_before():
    rig = Rig()
    rig.report(0, num_running=3, num_waiting=2, num_used_blocks=30, num_total_blocks=100)
    rig.report(1, num_running=1, num_waiting=0, num_used_blocks=20, num_total_blocks=100)
    rig.first_token(40, num_tokens=8)
    rig.sample_after(2.0)
    rig.clients[1].state = EngineState.DOWN
    rig.sample_after(1.0)
    rig.clock.advance(0.25)
    assert await rig.content() == {
        "span_ms": 300_000,
        "age_ms": [1250, 250],
        "tokens_per_s": [4.0, 0.0],
        "running": [4, 3],
        "waiting": [2, 2],
        "first_token_p50_ms": [40.0, 40.0],
        "first_token_p95_ms": [40.0, 40.0],
        "kv_use": [0.25, 0.3],
    }


async def test_without_engines_and_requests_there_is_no_share_and_no_quantile():
    rig = Rig()
    rig.clients.clear()
    rig.sample_after(1.0)
    content = await rig.content()
    assert (content["kv_use"], content["first_token_p50_ms"], content["running"]) == ([None], [None], [0])


async def test_quantiles_are_those_of_the_first_tokens_of_ten_samples():
    rig = Rig()
    for after_ms in range(100, 0, -1):
        rig.first_token(after_ms)
    rig.sample_after(1.0)
    rig.first_token(1000)
    for _ in range(10):
        rig.sample_after(1.0)
    content = await rig.content()
    assert content["first_token_p50_ms"] == [50.0] + 9 * [51.0] + [1000.0]
    assert content["first_token_p95_ms"] == [95.0] + 9 * [96.0] + [1000.0]
    rig.sample_after(1.0)
    assert (await rig.content())["first_token_p50_ms"][-1] is None


async def test_five_minutes_are_kept_and_no_more():
    rig = Rig()
    for _ in range(1000):
        rig.sample_after(1.0)
    ages = (await rig.content())["age_ms"]
    assert (ages[0], ages[-1], len(ages)) == (300_000, 0, 301)
    # A process that was stopped for a while has no samples of it, and older ones leave all the same.
    rig.clock.advance(200.0)
    assert len((await rig.content())["age_ms"]) == 101
