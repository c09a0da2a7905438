"""Cases about what a newer engine may send."""

from __future__ import annotations

from launcher.conformance.cases import Cases, Section
from launcher.conformance.frontend_under_test import FrontendUnderTest
from triptych.engine.v1 import engine_pb2

CASES: Cases[FrontendUnderTest] = Cases(Section.TRANSPORT)

# Field 100 of ConnectResponse with 2 bytes.
_UNKNOWN_MEMBER = bytes([0xA2, 0x06, 2, 8, 1])


@CASES.must("A message with an unknown member of the oneof, or with none, is ignored and counts for seq.")
async def unknown_member(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    session = attempt.session
    attempt.send([5, 6], is_first=True)
    for content in (_UNKNOWN_MEMBER, b""):
        numbered = engine_pb2.ConnectResponse(seq=session.last_seq + 1).SerializeToString()
        session.send_bytes(numbered + content)
    attempt.send([7, 8], ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])
