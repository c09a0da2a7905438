"""Cases about sequence numbers and acknowledgements."""

from __future__ import annotations

from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.frontend_under_test import FrontendUnderTest
from triptych_conformance.played_engine import ACK_INTERVAL_MESSAGES

CASES: Cases[FrontendUnderTest] = Cases(Section.NUMBERS)

# Beyond ack_interval_ms: what a busy machine and the network may add.
_LATE_S = 2.0


@CASES.must("The last message that was processed is acknowledged, in time, and never one that was not sent.")
async def acknowledgements(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(3 * ACK_INTERVAL_MESSAGES)
    attempt = await frontend.attempt_of(call)
    session = attempt.session
    for number in range(2 * ACK_INTERVAL_MESSAGES):
        attempt.send([5], is_first=number == 0)
    last_seq = session.last_seq
    await frontend.until(lambda: session.last_ack >= last_seq, f"ack of message {last_seq}", limit_s=_LATE_S)


@CASES.must("A number other than the next ends the stream, and the session is void; no text is lost.")
async def gap(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    session = attempt.session
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    session.send_bytes(None)
    attempt.send([7], ends=True)
    await frontend.until(lambda: session.num_streams == 0, "the end of the stream by the frontend")
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.output == [5, 6], "an ADD with the tokens before the gap", later.output)
    expect(len(session.hellos) == 1, "no resume of a void session", f"{len(session.hellos)} hellos")
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])
