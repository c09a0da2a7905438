"""Cases about sequence numbers, acknowledgements, and frontends that leave either out."""

from __future__ import annotations

import secrets
import time

import grpc

from triptych.engine.v1 import add_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.engine_stream import EngineStream
from triptych_conformance.engine_under_test import EngineUnderTest

CASES: Cases[EngineUnderTest] = Cases(Section.NUMBERS)

# So that few messages fill what gRPC buffers for a stream that is not read.
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
_NUM_UNREAD_REQUESTS = 8
# The limit of the text, and what gRPC may buffer on the way.
_NUM_UNREAD_MESSAGES = 3 * 8192
_NUM_REFUSED = 4000  # fewer than the ends that an engine remembers
_MAX_FILLING_S = 30.0
_FULL_WINDOW_S = 2.0
_NUM_HELD_HEARTBEATS = 2


@CASES.must(
    "Every message but hello_ack has a seq, from 1 without gaps, and heartbeat.last_seq is the one before."
)
async def gapless_numbers(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1), engine.entry(2))
    await stream.until_finished(1, 2)
    await stream.until(lambda: stream.record.heartbeats, "a heartbeat")


@CASES.must("Unacknowledged messages are kept: all from message 1 on can be sent again.")
async def unacknowledged_messages(engine: EngineUnderTest) -> None:
    engine.needs("resume")
    stream = await engine.open()
    await stream.add(engine.entry(1))
    await stream.until_finished(1)
    num_messages = stream.record.last_seq
    await stream.cut()
    resumed = await engine.must_resume(stream, last_seq=0)
    await resumed.until(lambda: resumed.last_received >= num_messages, f"messages 1 to {num_messages}")


@CASES.must("A frontend that does not read delays no other session, and finds everything when it reads on.")
async def unread_stream(engine: EngineUnderTest) -> None:
    slow = await engine.open(options=_SMALL_WINDOW)
    slow.stop_reading()
    handles = range(1, _NUM_UNREAD_REQUESTS + 1)
    await slow.add(*(engine.entry(handle) for handle in handles))
    other = await engine.open()
    await other.add(engine.entry(1))
    await other.until_finished(1)
    slow.continue_reading()
    await slow.until_finished(*handles)
    reference = await engine.reference()
    for handle in handles:
        tokens = slow.record.tokens[handle]
        expect(tokens == reference, "the tokens of the reference", f"others for handle {handle}: {tokens}")


@CASES.must("While more than replay_window_bytes are unacknowledged, steps wait; heartbeats continue.")
async def full_replay_window(engine: EngineUnderTest) -> None:
    stream = await _with_full_window(engine)
    record = stream.record
    await stream.add(engine.entry(1))
    num_heartbeats = len(record.heartbeats)
    await stream.until(lambda: len(record.heartbeats) >= num_heartbeats + _NUM_HELD_HEARTBEATS, "heartbeats")
    expect(not record.steps, "no step before an acknowledgement", f"{len(record.steps)} of them")
    await stream.ack()
    await stream.until_finished(1)
    tokens = record.tokens[1]
    expect(tokens == await engine.reference(), "the tokens of the reference afterwards", tokens)


@CASES.should(
    "A session whose window stays full for 2 s ends: RESOURCE_EXHAUSTED, SLOW_READER; others do not."
)
async def unacknowledged_session(engine: EngineUnderTest) -> None:
    stream = await _with_full_window(engine)
    other = await engine.open()
    await other.add(engine.entry(1))
    await other.until_finished(1)
    expect(other.record.tokens[1] == await engine.reference(), "the tokens of the reference", "others")
    stream.patience_s += _FULL_WINDOW_S
    await stream.must_end(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
    resumed = await engine.resume(stream)
    expect(resumed.hello_ack is not None and not resumed.hello_ack.resume_ok, "resume_ok false", "true")


@CASES.should(
    "A session that leaves 8,192 messages unread ends: RESOURCE_EXHAUSTED, SLOW_READER; others do not."
)
async def unread_messages(engine: EngineUnderTest) -> None:
    slow = await engine.open(options=_SMALL_WINDOW)
    slow.stop_reading()
    await slow.add(*(_refused(handle) for handle in range(1, _NUM_UNREAD_MESSAGES + 1)))
    other = await engine.open()
    await other.add(engine.entry(1))
    await other.until_finished(1)
    expect(other.record.tokens[1] == await engine.reference(), "the tokens of the reference", "others")
    slow.continue_reading()
    await slow.must_end(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")


async def _with_full_window(engine: EngineUnderTest) -> EngineStream:
    """A stream with more unacknowledged messages than the engine keeps.

    They are answers to aborts of requests that have ended, the largest that cost an engine little.
    """
    engine.needs("resume")
    stream = await engine.open()
    record, max_bytes = stream.record, engine.facts.hello_ack.replay_window_bytes
    # Those that are sent with the most bytes.
    handles = range(2**32 - _NUM_REFUSED, 2**32)
    await stream.add(*map(_refused, handles))
    await stream.until(lambda: len(record.rejected) == _NUM_REFUSED, f"{_NUM_REFUSED} rejections")
    ends_at = time.monotonic() + _MAX_FILLING_S
    while record.size_bytes <= max_bytes:
        if time.monotonic() > ends_at:
            raise NotApplicable(f"it takes longer than {_MAX_FILLING_S:g} s to have {max_bytes} bytes sent")
        record.already_finished.clear()
        await stream.abort(handles)
        await stream.until(lambda: len(record.already_finished) == _NUM_REFUSED, "already_finished")
    return stream


def _refused(handle: int) -> add_pb2.AddEntry:
    """An ADD that every engine refuses."""
    return add_pb2.AddEntry(handle=handle, request_id=secrets.token_hex(16))
