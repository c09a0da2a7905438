"""Cases about sequence numbers, acknowledgements, and frontends that leave either out."""

from __future__ import annotations

from launcher.conformance.cases import Cases, Section, expect
from launcher.conformance.engine_under_test import EngineUnderTest

CASES: Cases[EngineUnderTest] = Cases(Section.NUMBERS)

# So that few messages fill what gRPC buffers for a stream that is not read.
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
_NUM_UNREAD_REQUESTS = 8


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
