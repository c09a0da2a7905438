"""Cases about how sessions and streams end."""

from __future__ import annotations

import grpc

from launcher.conformance.cases import Cases, NotApplicable, Section, Turn, expect
from launcher.conformance.engine_under_test import EngineUnderTest
from service_kit.errors import Unavailable

CASES: Cases[EngineUnderTest] = Cases(Section.ENDS)


@CASES.must("goodbye aborts the requests of the session and ends the stream with OK; it cannot be resumed.")
async def goodbye(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, engine.long))
    await stream.until_tokens(1)
    await stream.goodbye(reason="conformance")
    await stream.must_end(grpc.StatusCode.OK)
    resumed = await engine.resume(stream)
    expect(resumed.hello_ack is not None and not resumed.hello_ack.resume_ok, "resume_ok false", "true")


@CASES.must("A frontend that is lost affects no other.")
async def lost_frontend(engine: EngineUnderTest) -> None:
    other = await engine.open()
    await other.add(engine.entry(1))
    lost = await engine.open()
    await lost.add(engine.entry(1))
    await lost.cut()
    await other.until_finished(1)
    expect(other.record.tokens[1] == await engine.reference(), "the tokens of the reference", "others")
    await other.add(engine.entry(2))
    await other.until_finished(2)


@CASES.must(
    "A draining engine says so, rejects ADDs with UNAVAILABLE, finishes what runs, and ends its streams.",
    turn=Turn.LAST,
)
async def drain(engine: EngineUnderTest) -> None:
    if engine.facts.drain is None:
        raise NotApplicable("it is not known how to drain the engine: --drain COMMAND")
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until(lambda: 1 in stream.record.first, "first of handle 1")
    await engine.facts.drain()
    await stream.until(lambda: stream.record.draining is not None, "draining")
    await stream.add(engine.entry(2))
    await stream.until(lambda: 2 in stream.record.rejected or stream.is_over, "add_rejected of a new ADD")
    if 2 in stream.record.rejected:
        error = stream.record.rejected[2]
        expect(isinstance(error, Unavailable), "UNAVAILABLE", repr(error))
    await stream.until_finished(1)
    await stream.ack()
    await stream.must_end(grpc.StatusCode.OK)
