"""A message that a frontend cannot take, and that every stream of its session begins with again."""

from __future__ import annotations

import asyncio

import grpc.aio

from frontend_svc.engines.connection.client import EngineClient, EngineState, FrontendIdentity
from frontend_svc.engines.connection.transport import GrpcTransport
from frontend_svc.output.loss import LossKind
from tests.engine_svc.fakes import expected_tokens
from tests.engine_svc.session.service_rig import make_entry, prompt_of, serving
from tests.system.test_resume import NoFiles, Taker, large_engine
from triptych_kit.clock import MonotonicClock

_PATIENCE_S = 30.0
# What an engine says of itself is less, and a step of all the rows below is more.
_MAX_RECEIVE_BYTES = 900
_NUM_ROWS = 120


def connect(address: str) -> GrpcTransport:
    """A transport that takes small messages alone."""
    options = [
        ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return GrpcTransport(grpc.aio.insecure_channel(address, options=options))


async def test_a_session_that_no_stream_can_go_on_with_is_given_up_and_a_new_one_works():
    engine, changed = large_engine(), asyncio.Event()

    async def until(condition) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while not condition():
                changed.clear()
                await changed.wait()

    async with serving(engine):
        client = EngineClient(
            engine.address,
            FrontendIdentity("f", 1),
            NoFiles(),  # type: ignore[arg-type]
            MonotonicClock(),
            on_change=lambda client: changed.set(),
            connect=connect,
        )
        client.start()
        try:
            await until(lambda: client.state is EngineState.READY)
            takers = [Taker(changed.set) for _ in range(_NUM_ROWS)]
            client.requests.add([make_entry(number, max_tokens=100) for number in range(_NUM_ROWS)], takers)
            await until(lambda: all(taker.is_over for taker in takers))
            assert {loss.kind for taker in takers for loss in taker.losses} == {LossKind.DISMISSAL}
            await until(lambda: client.state is EngineState.READY)
            again = Taker(changed.set)
            client.requests.add([make_entry(7, max_tokens=20)], [again])
            await until(lambda: again.is_over)
            assert again.token_ids == expected_tokens(prompt_of(7), 7, 20)
            assert engine.servicer.num_sessions + engine.servicer.num_parked_sessions == 1
        finally:
            await client.close()
