"""The page /ui/state: what it shows of engines, and that they are watched only while it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from frontend_svc.config import FrontendConfig
from frontend_svc.engines.connection.client import EngineState
from frontend_svc.engines.routing.account import EngineAccount
from frontend_svc.ui.state import StatePage, engine_names
from tests.frontend_svc.fakes import WAIT_S
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import session_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.limits import INTERNAL


class Watched(admin_pb2_grpc.AdminServiceServicer):
    """Sends the messages of `sent`, one after another, and counts its watchers."""

    def __init__(self, *messages: admin_pb2.WatchSchedulerResponse) -> None:
        self.sent: asyncio.Queue[admin_pb2.WatchSchedulerResponse | None] = asyncio.Queue()
        for message in messages:
            self.sent.put_nowait(message)
        self.requests: list[admin_pb2.WatchSchedulerRequest] = []
        self.num_watchers = 0

    async def WatchScheduler(self, request, context) -> AsyncIterator[admin_pb2.WatchSchedulerResponse]:
        self.requests.append(request)
        self.num_watchers += 1
        try:
            while (message := await self.sent.get()) is not None:
                yield message
        finally:
            self.num_watchers -= 1


def message(first_step: int = 1, num_steps: int = 1, **stats: int) -> admin_pb2.WatchSchedulerResponse:
    return admin_pb2.WatchSchedulerResponse(
        stats=session_pb2.Stats(num_running=1, num_total_blocks=40, num_used_blocks=3, **stats),
        requests=[
            admin_pb2.ScheduledRequest(
                request_id="r", status="WAITING", num_prompt_tokens=7, num_output_tokens=2,
                num_computed_tokens=5, num_preemptions=1, priority=-4, age_ms=30,
                blockers=["free_blocks"], block_ids=[3, 1, 2],
            )
        ],
        cached_block_ids=[9],
        steps=[
            admin_pb2.ScheduledStep(step_number=number, num_tokens=8, num_requests=2, duration_ms=1.23456)
            for number in range(first_step, first_step + num_steps)
        ],
    )  # fmt: skip


class Engine:
    """An engine that serves AdminService alone, and what the directory knows of it."""

    def __init__(self, admin: admin_pb2_grpc.AdminServiceServicer | None) -> None:
        self.address = ""
        self.engine_id = "engine-0"
        self.model = SimpleNamespace(name="tiny")
        self.dp_size = 2
        self.state = EngineState.READY
        self.requests = SimpleNamespace(account=EngineAccount("unused"))
        self._server = grpc.aio.server(options=INTERNAL.options())
        if admin is not None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)

    async def start(self) -> None:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


@contextlib.asynccontextmanager
async def shown(
    admin: admin_pb2_grpc.AdminServiceServicer | None, **options: Any
) -> AsyncIterator[tuple[Engine, StatePage, FakeClock]]:
    """The page of a frontend with one engine."""
    engine = Engine(admin)
    await engine.start()
    engines: Any = SimpleNamespace(
        directory=SimpleNamespace(clients=lambda: [engine]),
        failover=SimpleNamespace(num_held=1),
        has_coordinator=True,
        wave_of={"engine-0": 4}.get,
    )
    requests: Any = SimpleNamespace(
        admission=SimpleNamespace(num_queued=2), draining=SimpleNamespace(num_open=3)
    )
    clock = FakeClock(100.0)
    page = StatePage(engines, requests, clock, **options)
    try:
        yield engine, page, clock
    finally:
        await page.close()
        await engine.stop()


async def state_of(page: StatePage) -> dict[str, Any]:
    made = await page.make("/ui/state")
    assert (made.content_type, made.status) == ("application/json", 200)
    return json.loads(made.body)


async def engine_when(page: StatePage, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state of the engine, once it `holds`."""
    async with asyncio.timeout(WAIT_S):
        while not holds(engine := (await state_of(page))["engines"][0]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return engine


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  There is no event for it.
            await asyncio.sleep(0.005)


async def test_the_first_answer_has_the_newest_state_of_the_engine():
    counts = {"num_prefix_queries": 8, "num_prefix_hits": 2, "num_preemptions": 6}
    admin = Watched(message(num_pins=2, num_pinned_blocks=3, **counts))
    async with shown(admin) as (engine, page, _):
        state = await state_of(page)
        assert state["frontend"] == {"open": 3, "queued": 2, "held": 1}
        assert state["coordinator"] == {"connected": True}
        assert state["engines"] == [
            {
                "name": engine.address, "address": engine.address,
                "engine_id": "engine-0", "model": "tiny", "state": "ready",
                "rank": 0, "wave": 4, "age_ms": 0,
                "running": 1, "waiting": 0, "free_blocks": 37, "total_blocks": 40,
                "pins": 2, "pinned_blocks": 3, "prefix_hit_rate": 0.25,
                "preemptions": 6, "prompt_tokens": 0, "generated_tokens": 0,
                "steps": [{"step": 1, "num_tokens": 8, "num_requests": 2, "duration_ms": 1.235}],
                "requests": [
                    {
                        "id": "r", "status": "WAITING", "num_prompt_tokens": 7, "num_output_tokens": 2,
                        "num_computed_tokens": 5, "num_preemptions": 1, "priority": -4, "age_ms": 30,
                        "blockers": ["free_blocks"], "blocks": [3, 1, 2],
                    }
                ],
                "cached_blocks": [9],
            }
        ]  # fmt: skip
        assert admin.requests[0].interval_ms == 100


def test_an_engine_at_a_socket_has_the_name_of_the_socket_where_no_other_has_it():
    assert engine_names(["unix:/run/a/engine-0.sock", "unix:/run/a/engine-1.sock", "host:50061"]) == {
        "unix:/run/a/engine-0.sock": "engine-0",
        "unix:/run/a/engine-1.sock": "engine-1",
        "host:50061": "host:50061",
    }
    same = ["unix:/run/a/engine-0.sock", "unix:/run/b/engine-0.sock"]
    assert engine_names(same) == dict(zip(same, same, strict=True))


def test_engines_are_in_the_order_of_their_names_and_numbers():
    addresses = [f"unix:/run/engine-{number}.sock" for number in (10, 2, 0)] + ["host:9", "10.0.0.1:5"]
    assert list(engine_names(addresses).values()) == [
        "10.0.0.1:5",
        "engine-0",
        "engine-2",
        "engine-10",
        "host:9",
    ]


async def test_one_watch_serves_all_that_ask_and_keeps_the_last_steps():
    admin = Watched(message(1, 100))
    async with shown(admin) as (_, page, clock):
        await asyncio.gather(*(state_of(page) for _ in range(5)))
        admin.sent.put_nowait(message(101, 100))
        engine = await engine_when(page, lambda engine: len(engine["steps"]) > 100)
        assert [step["step"] for step in engine["steps"]] == list(range(81, 201))
        assert admin.num_watchers == 1 and len(admin.requests) == 1
        clock.advance(0.75)
        assert (await state_of(page))["engines"][0]["age_ms"] == 750


async def test_watching_ends_when_the_page_is_not_asked_for_and_begins_again_when_it_is():
    admin = Watched(message(), message())
    async with shown(admin, idle_s=0.5) as (_, page, clock):
        await state_of(page)
        assert admin.num_watchers == 1
        clock.advance(0.5)
        await until(lambda: admin.num_watchers == 0)
        admin.sent.put_nowait(message())
        assert (await state_of(page))["engines"][0]["requests"]


async def test_an_engine_that_serves_no_watch_is_shown_as_routing_knows_it():
    async with shown(None) as (_, page, _):
        [engine] = (await state_of(page))["engines"]
        assert (engine["state"], engine["age_ms"], engine["requests"]) == ("ready", None, [])


async def test_a_watch_that_ends_is_begun_again_after_a_second_and_not_sooner():
    admin = Watched(message())
    async with shown(admin) as (_, page, clock):
        await state_of(page)
        admin.sent.put_nowait(None)
        await until(lambda: admin.num_watchers == 0)
        for _ in range(3):
            await state_of(page)
        assert len(admin.requests) == 1
        clock.advance(1.0)
        admin.sent.put_nowait(message(num_preemptions=2))
        assert (await state_of(page))["engines"][0]["preemptions"] == 2


async def test_an_engine_that_does_not_answer_holds_up_no_later_request():
    async with shown(Watched()) as (_, page, clock):
        await state_of(page)
        clock.advance(1.0)
        [engine] = (await state_of(page))["engines"]
        assert engine["age_ms"] is None


async def test_a_lost_engine_is_not_watched_and_one_that_reconnects_still_is():
    admin = Watched(message())
    async with shown(admin) as (engine, page, _):
        await state_of(page)
        engine.state = EngineState.RECONNECTING
        assert (await state_of(page))["engines"][0]["requests"]
        engine.state = EngineState.DOWN
        [lost] = (await state_of(page))["engines"]
        assert (lost["state"], lost["age_ms"], lost["requests"]) == ("down", None, [])
        await until(lambda: admin.num_watchers == 0)


async def test_watches_end_with_the_page():
    admin = Watched(message())
    async with shown(admin) as (_, page, _):
        await state_of(page)
        await page.close()
        await until(lambda: admin.num_watchers == 0)


@pytest.mark.parametrize(
    ("host", "ui", "is_served"),
    [("127.0.0.1", False, True), ("0.0.0.0", False, False), ("0.0.0.0", True, True)],
)
def test_the_page_is_on_where_the_listener_is_on_loopback_or_by_the_flag(
    host: str, ui: bool, is_served: bool
):
    config = FrontendConfig(engine=("127.0.0.1:1",), admin_http_host=host, insecure=True, ui=ui)
    assert config.serves_ui is is_served
