"""What has ended is freed at once: in an engine, a collection that would find it may never come."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import grpc.aio
import pytest

from engine_svc.admin.utility import UtilityDesk
from engine_svc.loop.mailbox import KVEventLog
from engine_svc.session.kv_subscription import KVSubscription
from engine_svc.session.servicer import FULL_NAME
from engine_svc.session.session import Session
from service_kit.channel import open_channel
from tests.connections import without_collections
from tests.engine_svc.fakes import LIMIT_S
from tests.engine_svc.session.service_rig import ServiceRig, StreamClient, make_entry, parked, serving
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2

RESUME = {"features": ["resume"]}


class Population:
    """The objects of a type that have come since, whoever left others in this process before."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        # Held, so that no other gets the place of one of them, by which they are known.
        self._others = [one for one in gc.get_objects() if type(one) is kind]

    async def until_freed(self, num_left: int = 0) -> None:
        """Wait until no more are there; what a call does after its end has no event."""
        others = {id(one) for one in self._others}
        async with asyncio.timeout(LIMIT_S):
            while self._count(others) > num_left:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def _count(self, others: set[int]) -> int:
        return sum(type(one) is self._kind and id(one) not in others for one in gc.get_objects())


async def used(stub: engine_pb2_grpc.EngineCoreServiceStub) -> StreamClient:
    """A client that can resume, one request of which has ended and one is refused."""
    client = StreamClient(stub, "f")
    await client.open(**RESUME)
    await client.add(make_entry(1, max_tokens=2), make_entry(2, max_tokens=0))
    await client.until_ended(1)
    await client.flush()
    return client


async def says_goodbye(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    client = await used(stub)
    await client.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
    await client.until(lambda: client.is_over)
    return 0


async def is_refused_a_message(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    client = await used(stub)
    await client.say_hello()
    await client.until(lambda: client.error is not None)
    return 0


async def does_not_come_back(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    rig.engine.replay_window_s = 0.02
    client = await used(stub)
    await client.close()
    return 0


async def cannot_come_back(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    rig.engine.replay_window_s = 0.0
    client = await used(stub)
    await client.close()
    return 0


async def is_superseded(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    first = await used(stub)
    await StreamClient(stub, "f").open(frontend_epoch=2)
    await first.until(lambda: first.error is not None)
    return 1


async def is_superseded_while_away(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    first = await used(stub)
    await first.close()
    await parked(rig, stub)
    second = StreamClient(stub, "f")
    await second.open(frontend_epoch=2)
    await second.flush()
    return 1


async def comes_back_and_says_goodbye(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    first = await used(stub)
    second = StreamClient(stub, "f")
    await second.open(**RESUME, resume=session_pb2.ResumePoint(engine_epoch=7))
    await first.until(lambda: first.error is not None)
    await second.send(engine_pb2.ConnectRequest(goodbye=engine_pb2.Goodbye()))
    await second.until(lambda: second.is_over)
    return 0


async def sends_what_nobody_can_read(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> int:
    rig.engine.replay_window_s = 0.0
    async with open_channel(rig.address) as channel:
        # The stubs know neither a call without serializers nor one that is written to.
        connect: Any = channel.stream_stream
        call = connect(f"/{FULL_NAME}/Connect")()
        hello = session_pb2.Hello(frontend_id="f", session_id="s", frontend_epoch=1, schema_revision=1)
        await call.write(engine_pb2.ConnectRequest(hello=hello).SerializeToString())
        await call.write(b"\xff")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read():
                pass
        assert await call.code() is not grpc.StatusCode.OK
    return 0


@pytest.mark.parametrize(
    "end",
    [
        says_goodbye,
        is_refused_a_message,
        does_not_come_back,
        cannot_come_back,
        is_superseded,
        is_superseded_while_away,
        comes_back_and_says_goodbye,
        sends_what_nobody_can_read,
    ],
)
async def test_a_session_that_has_ended_is_freed_without_a_collection(end):
    rig = ServiceRig()
    async with serving(rig) as stub:
        with without_collections():
            sessions, desks = Population(Session), Population(UtilityDesk)
            num_left = await end(rig, stub)
            await sessions.until_freed(num_left)
            await desks.until_freed(num_left)


async def test_a_subscription_that_has_ended_is_freed_without_a_collection():
    rig = ServiceRig(kv_event_log=KVEventLog(max_batches=8, max_blocks=8))
    async with serving(rig) as stub:
        with without_collections():
            subscriptions = Population(KVSubscription)
            call = stub.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest())
            await call.read()
            call.cancel()
            await subscriptions.until_freed()
