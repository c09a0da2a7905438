"""Cases about a session that outlives its stream."""

from __future__ import annotations

import asyncio
import secrets

import grpc

from triptych.engine.v1 import add_pb2, session_pb2
from triptych_conformance.cases import Cases, Section, Turn, expect
from triptych_conformance.engine_under_test import EngineUnderTest

CASES: Cases[EngineUnderTest] = Cases(Section.RESUMING)

# Messages that a frontend received and did not process before its stream broke.
_NUM_UNPROCESSED = 3


@CASES.must(
    "A resumed session continues after last_seq: the same numbers and bytes, then the rest of all tokens."
)
async def resume_after_cut(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until_tokens(1, 4)
    await stream.cut()
    resumed = await engine.must_resume(stream, last_seq=max(0, stream.record.last_seq - _NUM_UNPROCESSED))
    await resumed.until_finished(1)
    tokens = resumed.record.tokens[1]
    expect(tokens == await engine.reference(), "the tokens of the reference across the cut", tokens)


@CASES.must("Requests continue while their session has no stream.")
async def requests_continue(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until(lambda: 1 in stream.record.first, "first of handle 1")
    await stream.cut()
    other = await engine.open()
    await other.add(engine.entry(1))
    await other.until_finished(1)
    resumed = await engine.must_resume(stream)
    await resumed.until_finished(1)


@CASES.must("A stream that is closed without goodbye counts as broken: the session can be resumed.")
async def closed_without_goodbye(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until_tokens(1)
    await stream.half_close()
    await stream.until(lambda: stream.is_over, "the end of the stream")
    expect(stream.error is not None, "an end of the stream with an error", stream.end)
    resumed = await engine.must_resume(stream)
    await resumed.until_finished(1)


@CASES.must("resume_ok is false for another engine_epoch, resume_refusal says so, and numbers begin at 1.")
async def other_engine_epoch(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.cut()
    epoch = engine.facts.hello_ack.engine_epoch ^ 1
    resumed = await engine.resume(stream, engine_epoch=epoch)
    await engine.must_be_new(resumed, session_pb2.RESUME_REFUSAL_OTHER_EPOCH)


@CASES.must("resume_ok is false for another session_id, frontend_id or frontend_epoch.")
async def unknown_session(engine: EngineUnderTest) -> None:
    for other in (
        {"session_id": secrets.token_hex(16)},
        {"frontend_id": "conformance-unknown"},
        {"frontend_epoch": 1},
    ):
        stream = await engine.open()
        await stream.cut()
        resumed = await engine.resume(stream, **other)
        await engine.must_be_new(resumed, session_pb2.RESUME_REFUSAL_NO_SESSION)


@CASES.must("resume_ok is false where messages after last_seq were acknowledged before.")
async def acknowledged_further(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until_finished(1)
    await stream.ack()
    # The answer to a request that was sent later shows that the acknowledgement was processed.
    await stream.add(engine.entry(2))
    await stream.until_finished(2)
    await stream.cut()
    resumed = await engine.resume(stream, last_seq=1)
    await engine.must_be_new(resumed, session_pb2.RESUME_REFUSAL_NOT_KEPT)


@CASES.must("resume_ok is false for a last_seq that was never sent.")
async def never_sent(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.cut()
    resumed = await engine.resume(stream, last_seq=1_000_000)
    await engine.must_be_new(resumed, session_pb2.RESUME_REFUSAL_NEVER_SENT)


@CASES.must("Without the feature `resume` a session ends with its stream.")
async def feature_not_named(engine: EngineUnderTest) -> None:
    stream = await engine.open(features=())
    await stream.cut()
    await engine.must_be_new(await engine.resume(stream), session_pb2.RESUME_REFUSAL_NO_SESSION)


@CASES.must("After replay_window_ms the session is over.", turn=Turn.BESIDE_OTHERS)
async def after_the_window(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    await stream.cut()
    await asyncio.sleep((engine.facts.hello_ack.replay_window_ms + 1000) / 1000)
    await engine.must_be_new(await engine.resume(stream), session_pb2.RESUME_REFUSAL_NO_SESSION)


@CASES.must("The stream that still carried a resumed session ends with ABORTED, SUPERSEDED.")
async def two_streams(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    await stream.add(engine.entry(1))
    resumed = await engine.must_resume(stream, last_seq=1)
    await stream.must_end(grpc.StatusCode.ABORTED, "SUPERSEDED")
    await resumed.until_finished(1)
    expect(resumed.record.tokens[1] == await engine.reference(), "the tokens of the reference", "others")


@CASES.must("An ADD that is sent again is taken once, in flight as after its end.")
async def add_sent_again(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    again = add_pb2.Add(entries=[engine.entry(1)])
    await stream.add(*again.entries)
    await stream.cut()
    resumed = await engine.must_resume(stream, last_seq=1)
    await resumed.send(add=again)
    await resumed.until_finished(1)
    await resumed.send(add=again)
    # In order after the one before, so that a second answer to that would come first.
    await resumed.add(engine.entry(2))
    await resumed.until_finished(2)
    tokens = resumed.record.tokens[1]
    expect(tokens == await engine.reference(), "the tokens of the reference, once", tokens)
