"""Memory of a session does not depend on how much it has sent."""

from __future__ import annotations

import asyncio
from array import array

from engine_svc.loop.step_output import StepOutput
from tests.engine_svc.fakes import LIMIT_S
from tests.engine_svc.session.service_rig import ServiceRig, served, session_id_of
from tests.resident import resident_mib
from triptych.engine.v1 import engine_pb2, session_pb2

NUM_ROWS = 1000
NUM_STEPS = 1000
# Until pools and buffers have their size.
NUM_WARM_STEPS = 200
MAX_GROWTH_MIB = 5


async def test_a_million_outputs_leave_memory_as_it_was():
    async with served(max_replay_bytes=8 * 1024 * 1024) as (rig, stub):
        call = stub.Connect()
        hello = session_pb2.Hello(
            frontend_id="f",
            session_id=session_id_of("f"),
            frontend_epoch=1,
            schema_revision=1,
            features=["resume"],
        )
        await call.write(engine_pb2.ConnectRequest(hello=hello))
        await exchange(rig, call, NUM_WARM_STEPS)
        before = resident_mib()
        await exchange(rig, call, NUM_STEPS)
        growth = resident_mib() - before
        call.cancel()
    assert growth < MAX_GROWTH_MIB


async def exchange(rig: ServiceRig, call, num_steps: int) -> None:
    """Publish steps as the engine thread does, and read and acknowledge each."""
    num_read, num_published, token = 0, 0, 0
    async with asyncio.timeout(LIMIT_S):
        while num_read < num_steps * NUM_ROWS:
            if num_read == num_published * NUM_ROWS and rig.servicer.num_sessions:
                (session,) = rig.servicer._sessions
                token = num_published % 50_000
                output = StepOutput(num_published, list(range(NUM_ROWS)), [1] * NUM_ROWS, [token] * NUM_ROWS)
                session._outbox.publish(output)
                num_published += 1
            message = await call.read()
            if message.WhichOneof("message") != "step":
                continue
            ids = array("I", message.step.token_ids)
            assert ids == array("I", [token]) * NUM_ROWS
            num_read += len(ids)
            ack = engine_pb2.Ack(last_seq=message.seq)
            await call.write(engine_pb2.ConnectRequest(ack=ack))
