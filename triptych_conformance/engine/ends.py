"""Cases about how sessions and streams end."""

from __future__ import annotations

import grpc

from triptych.engine.v1 import session_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, Turn, expect
from triptych_conformance.engine_under_test import NUM_REFERENCE_TOKENS, EngineUnderTest, column
from triptych_kit.errors import NotFound, Unavailable

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
    "After a death another engine_epoch answers: sessions and orphans are gone, ADDs continue requests.",
    turn=Turn.LAST,
)
async def death(engine: EngineUnderTest) -> None:
    reference, epoch = await engine.reference(), engine.facts.hello_ack.engine_epoch
    without_hello, idle, busy, parked = engine.connect(), *[await engine.open() for _ in range(3)]
    orphan = engine.entry(1, engine.long, resume_state=b"conformance")
    await parked.add(orphan)
    await parked.until_tokens(1)
    await parked.cut()
    await busy.add(engine.entry(1, engine.long))
    await busy.until_tokens(1)
    await busy.add(engine.entry(2))
    after = await engine.restart()
    for stream in (without_hello, idle, busy):
        await stream.must_break()
    expect(engine.facts.hello_ack.engine_epoch != epoch, "another engine_epoch", "the same")
    await engine.until_loaded(after)
    for stream in (idle, busy, parked):
        resumed = await engine.resume(stream, engine_epoch=epoch)
        await engine.must_be_new(resumed, session_pb2.RESUME_REFUSAL_OTHER_EPOCH)
    if "adopt" in engine.facts.hello_ack.features:
        await after.adopt(9, orphan.request_id)
        error = await after.rejection_of(9)
        expect(isinstance(error, NotFound), "NOT_FOUND", repr(error))
    given = busy.record.tokens[1][: NUM_REFERENCE_TOKENS // 2]
    await after.add(engine.entry(1, output_token_ids=column(given), attempt=1))
    await after.until_finished(1)
    tokens = given + after.record.tokens[1]
    expect(tokens == reference, "the tokens of the reference across the death", tokens)


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
