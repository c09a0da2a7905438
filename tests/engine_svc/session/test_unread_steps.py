"""A step that cannot be told, for a bug of ours: it ends its session, and nothing is left out unheard."""

from __future__ import annotations

import grpc
from grpc_status import rpc_status

from engine_svc.core.step import TokenLogprobs
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.loop.logprob_executor import telling
from tests.engine_svc.session.service_rig import (
    LENGTH,
    ServiceRig,
    StreamClient,
    added,
    lost,
    make_entry,
    parked,
    prompt_of,
    serving,
    until_finished,
)
from triptych.engine.v1 import session_pb2

RESUME = {"features": ["resume"]}
UNTELLABLE = 2


def make_rig() -> ServiceRig:
    """An engine that tells of fewer places than the second request has tokens."""
    rig = ServiceRig()
    untellable_id = make_entry(UNTELLABLE).request_id
    nothing = TokenLogprobs([], [])
    telling(rig.executor, lambda request_id: nothing if request_id.startswith(untellable_id) else None)
    return rig


async def hears_that_it_is_dismissed(client: StreamClient) -> None:
    await client.until(lambda: client.is_over)
    assert client.error is not None
    status = rpc_status.from_call(client.error)
    assert status is not None
    assert status.code == grpc.StatusCode.ABORTED.value[0]
    assert b"STEP_LOST" in status.details[0].value


def tells_no_token_behind_a_hole(client: StreamClient) -> bool:
    tokens = client.tokens[1]
    return tokens == expected_tokens(prompt_of(1), 1, 50)[: len(tokens)] and not client.finished


async def test_a_step_that_cannot_be_told_ends_its_session_and_no_other(caplog):
    rig = make_rig()
    async with serving(rig) as stub:
        client, other = StreamClient(stub, "f"), StreamClient(stub, "other")
        await client.open(**RESUME)
        await other.open()
        await added(rig, client, make_entry(1, max_tokens=50), hold_at=5)
        await client.add(make_entry(UNTELLABLE, max_tokens=50))
        await client.flush()
        await other.add(make_entry(1, max_tokens=20))
        await other.flush()
        rig.executor.gate.set()
        await hears_that_it_is_dismissed(client)
        assert tells_no_token_behind_a_hole(client)
        await other.until_ended(1)
        assert other.finished == {1: [LENGTH]}
        stats = await until_finished(stub, 3)
        assert (stats.num_running, stats.num_used_blocks) == (0, 0)
        assert rig.servicer.num_parked_sessions == 0
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None


async def test_one_that_waited_for_a_stream_ends_the_session_that_comes_back():
    rig = make_rig()
    async with serving(rig) as stub:
        client = StreamClient(stub, "f")
        await client.open(**RESUME)
        await added(rig, client, make_entry(1, max_tokens=50), hold_at=5)
        await client.until(lambda: bool(client.tokens.get(1)))
        await client.add(make_entry(UNTELLABLE, max_tokens=50))
        await client.flush()
        await client.close()
        await parked(rig, stub)
        rig.executor.gate.set()
        await until_finished(stub, 2)
        second = StreamClient(stub, "f")
        second.tokens = client.tokens
        last_read = session_pb2.ResumePoint(engine_epoch=7, last_seq=client.heard[-1].seq)
        await second.open(**RESUME, resume=last_read)
        await hears_that_it_is_dismissed(second)
        assert tells_no_token_behind_a_hole(second)
        await lost(rig, stub)
        assert rig.servicer.num_parked_sessions == 0
