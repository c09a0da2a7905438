"""Cases about heartbeats and utility calls."""

from __future__ import annotations

import asyncio
import itertools
import time

import grpc

from triptych.engine.v1 import session_pb2, utility_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.engine_under_test import EngineUnderTest

CASES: Cases[EngineUnderTest] = Cases(Section.HEALTH)

_WATCHED_S = 2.0
_TICK_S = 0.05
_HEARTBEAT_S = 0.5
# A frontend takes a stream without a message for as long as this for silent.
_MAX_SILENCE_S = 3 * _HEARTBEAT_S


# Not beside others: large messages delay this process as well.
@CASES.must("A heartbeat comes every 0.5 s on every stream.")
async def heartbeats(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    arrived_at = [time.monotonic()]
    ends_at = arrived_at[0] + _WATCHED_S
    delays_s = [0.0]
    watching = asyncio.create_task(_watch_delays(delays_s))
    try:
        while time.monotonic() < ends_at:
            await stream.until(lambda: len(stream.record.heartbeats) >= len(arrived_at), "another heartbeat")
            arrived_at.append(time.monotonic())
    finally:
        watching.cancel()
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(arrived_at)) - max(delays_s)
    expect(
        longest_s < _MAX_SILENCE_S, f"a heartbeat within {_MAX_SILENCE_S:g} s", f"{longest_s:.2f} s without"
    )
    num_expected = _WATCHED_S / _HEARTBEAT_S
    expected = f"{num_expected / 2:g} to {num_expected * 2:g} heartbeats in {_WATCHED_S:g} s"
    num_seen = len(stream.record.heartbeats)
    expect(num_expected / 2 <= num_seen <= num_expected * 2, expected, num_seen)


@CASES.must("Heartbeats name the state.")
async def state_in_heartbeats(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.until(lambda: stream.record.heartbeats, "a heartbeat")
    heartbeat = stream.record.heartbeats[-1]
    expect(heartbeat.state == session_pb2.ENGINE_STATE_READY, "state READY", heartbeat.state)


@CASES.must("A utility call that is not known is answered with UNIMPLEMENTED, CALL_NOT_SERVED.")
async def unknown_call(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.send(utility=utility_pb2.UtilityCall(call_id=5))
    await stream.until(lambda: 5 in stream.record.results, "utility_result of call 5")
    failure = stream.record.results[5].failure
    expect(failure.code == grpc.StatusCode.UNIMPLEMENTED.value[0], "UNIMPLEMENTED", failure)


@CASES.must("Each utility call has one utility_result, with its call_id.")
async def results_of_calls(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    for call_id in (7, 8):
        call = utility_pb2.UtilityCall(
            call_id=call_id, get_supported_tasks=utility_pb2.GetSupportedTasksCall()
        )
        await stream.send(utility=call)
    await stream.until(lambda: {7, 8} <= stream.record.results.keys(), "results of calls 7 and 8")


async def _watch_delays(delays_s: list[float]) -> None:
    """Append how late this process itself was, which says nothing about the engine."""
    while True:
        due_at = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        delays_s.append(time.monotonic() - due_at)
