"""What a frontend says of requests that have ended reaches the features: once, and of no other request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from engine_svc.convert.feature import WireFeature, WireFeatures
from engine_svc.core.extras import Extra
from engine_svc.scheduler.feature import SchedulerFeature
from tests.engine_svc.fakes import make_scheduler
from tests.engine_svc.session.service_rig import ServiceRig, StreamClient, added, connected, make_entry
from triptych.engine.v1 import engine_pb2, session_pb2
from triptych_kit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Said(Extra):
    name: str


class Reader(WireFeature):
    message = "finish_hint"

    def read(self, message: session_pb2.FinishHint) -> Said:
        if message.tool_name == "invalid":
            raise InvalidArgument("invalid", field="tool_name")
        return Said(message.tool_name)


class Listener(SchedulerFeature):
    def __init__(self) -> None:
        self.notes: list[tuple[str, Extra]] = []

    def on_note(self, request_id: str, note: Extra, now: float) -> None:
        self.notes.append((request_id, note))


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[ServiceRig, StreamClient, Listener]]:
    listener = Listener()
    options = {"features": WireFeatures([Reader()]), "scheduler": make_scheduler(features=[listener])}
    async with connected(**options) as (rig, _, client):
        yield rig, client, listener


async def say(client: StreamClient, handle: int, name: str) -> None:
    hint = session_pb2.FinishHint(handle=handle, tool_name=name)
    await client.send(engine_pb2.ConnectRequest(finish_hint=hint))


def names_of(listener: Listener) -> list[tuple[str, str]]:
    """The requests by the ids of their ADDs, and what was said of them."""
    notes = listener.notes
    return [(request_id.split("/")[0], note.name) for request_id, note in notes if isinstance(note, Said)]


async def test_what_is_said_of_a_request_after_its_end_is_passed_on_once():
    async with listening() as (_, client, listener):
        await client.add(make_entry(1))
        await client.until_ended(1)
        for name in "first", "second":
            await say(client, 1, name)
        await say(client, 99, "of an unknown handle")
        await client.add(make_entry(2))
        await client.until_ended(2)
    assert names_of(listener) == [(f"{1:032x}", "first")]


async def test_of_a_request_that_runs_nothing_is_said_before_it_is_aborted():
    async with listening() as (rig, client, listener):
        await added(rig, client, make_entry(1, max_tokens=30), hold_at=2)
        await say(client, 1, "too early")
        await client.abort(1)
        for name in "first", "second":
            await say(client, 1, name)
        await client.flush()
        rig.executor.gate.set()
        await client.until_ended(1)
        await say(client, 1, "third")
        await client.add(make_entry(2))
        await client.until_ended(2)
    assert names_of(listener) == [(f"{1:032x}", "first")]


async def test_what_cannot_be_read_disturbs_nothing():
    async with listening() as (_, client, listener):
        await client.add(make_entry(1), make_entry(2))
        await client.until_ended(1, 2)
        await say(client, 1, "invalid")
        await say(client, 2, "valid")
        await client.add(make_entry(3))
        await client.until_ended(3)
    assert names_of(listener) == [(f"{2:032x}", "valid")]
