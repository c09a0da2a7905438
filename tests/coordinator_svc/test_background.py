"""A coordinator whose loops fail ends, and says so."""

from __future__ import annotations

import asyncio
import logging

from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator_svc.run import EXIT_LOOP_FAILED, serve_beside
from triptych_kit.channel import open_channel
from triptych_kit.server import ADMIN, Server, run_server


class Serving:
    """A server without a service, served until a signal comes."""

    def __init__(self) -> None:
        self.address = ""
        self.health: list[int] = []  # as it was while it drained
        self.server = Server(listen="127.0.0.1:0", registrations=[], profile=ADMIN, service="coordinator")
        self.is_up = asyncio.Event()

    async def until_signal(self) -> int:
        return await run_server(
            [self.server], on_drain=self._ask_health, drain_deadline_s=10.0, announce=self._announce
        )

    def _announce(self, addresses: list[str]) -> None:
        (self.address,) = addresses
        self.is_up.set()

    async def _ask_health(self) -> None:
        async with open_channel(self.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=10
            )
        self.health.append(answer.status)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_an_error_in_a_loop_ends_the_process_with_70_and_one_line(caplog):
    serving = Serving()

    async def fail() -> None:
        await serving.is_up.wait()
        raise ValueError("generation 2**64 does not fit")

    with caplog.at_level(logging.ERROR):
        exit_code = await serve_beside([for_ever(), fail()], serving.until_signal())
    assert exit_code == EXIT_LOOP_FAILED == 70
    assert serving.health == [health_pb2.HealthCheckResponse.NOT_SERVING]
    [line] = caplog.records
    assert line.message == "background task failed"
    assert line.exc_info is not None
    assert isinstance(line.exc_info[1], ValueError)


async def test_loops_end_with_the_serving_whose_code_is_kept() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    async def serve() -> int:
        await asyncio.sleep(0)
        return 3

    assert await serve_beside([work()], serve()) == 3
    await asyncio.wait_for(ended.wait(), 10)
