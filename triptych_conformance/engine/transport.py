"""Cases about messages as such: what a newer frontend may send, and what is too large."""

from __future__ import annotations

import secrets

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.engine_under_test import EngineUnderTest

CASES: Cases[EngineUnderTest] = Cases(Section.TRANSPORT)

# Field 100 of ConnectRequest with 2 bytes, and field 1000 of any message with 1 byte.
_UNKNOWN_MEMBER = bytes([0xA2, 0x06, 2, 8, 1])
_UNKNOWN_FIELD = bytes([0xC2, 0x3E, 1, 120])
_MAX_SENT_BYTES = 256 * 1024 * 1024


@CASES.must("A message with an unknown member of the oneof, or with none, is ignored.")
async def unknown_member(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.send_bytes(_UNKNOWN_MEMBER)
    await stream.send_bytes(b"")
    await stream.add(engine.entry(1))
    await stream.until_finished(1)


@CASES.must("Unknown fields of a known message are ignored.")
async def unknown_field(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    entry = engine.entry(1)
    entry.MergeFromString(_UNKNOWN_FIELD)
    await stream.add(entry)
    await stream.until_finished(1)
    expect(stream.record.tokens[1] == await engine.reference(), "the tokens of the reference", "others")


@CASES.must("Several frontends may be connected: handles, request_ids and aborts are those of a session.")
async def two_frontends(engine: EngineUnderTest) -> None:
    one, other = await engine.open(), await engine.open()
    request_id = secrets.token_hex(16)
    for stream in (one, other):
        await stream.add(engine.entry(1, engine.long, request_id=request_id))
        await stream.add(engine.entry(2, request_id=request_id, attempt=1))
        await stream.until_tokens(1)
    await one.abort([1])
    await one.until_finished(1, 2)
    # When its end comes, the abort has had its effect.
    await other.add(engine.entry(3))
    await other.until_finished(2, 3)
    finished = other.record.finished.get(1)
    is_aborted = finished is not None and finished.reason == output_pb2.FINISH_REASON_ABORT
    expect(not is_aborted, "no abort of the request of the other session", finished)
    for stream in (one, other):
        tokens = stream.record.tokens[2]
        expect(tokens == await engine.reference(), "the tokens of the reference", tokens)


@CASES.must("A message above max_frame_bytes is not taken, and does not affect other sessions.")
async def oversized_message(engine: EngineUnderTest) -> None:
    max_bytes = engine.facts.hello_ack.max_frame_bytes
    expect(max_bytes > 0, "hello_ack.max_frame_bytes", max_bytes)
    if max_bytes > _MAX_SENT_BYTES:
        raise NotApplicable(f"max_frame_bytes is {max_bytes}")
    other = await engine.open()
    await other.add(engine.entry(1))
    stream = await engine.open()
    await stream.send(goodbye=engine_pb2.Goodbye(reason="x" * max_bytes))
    await stream.until(lambda: stream.is_over, "the end of the stream")
    expect(stream.error is not None, "an end of the stream with an error", stream.end)
    await other.until_finished(1)
