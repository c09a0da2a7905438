"""Cases about what a newer engine may send."""

from __future__ import annotations

from triptych.engine.v1 import engine_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.frontend_under_test import FrontendUnderTest

CASES: Cases[FrontendUnderTest] = Cases(Section.TRANSPORT)

# Field 100 of ConnectResponse with 2 bytes.
_UNKNOWN_MEMBER = bytes([0xA2, 0x06, 2, 8, 1])
# Less than half of the ADDs of one request with these outputs, each of which has the prompt.
_MAX_FRAME_BYTES = 16 * 1024
_NUM_LONG_PROMPT_TOKENS = 1500
_NUM_OUTPUTS = 8


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


@CASES.must("No message is larger than max_frame_bytes of hello_ack, also after a resume.")
async def small_frames(frontend: FrontendUnderTest) -> None:
    for engine in frontend.engines:
        await engine.restart(max_frame_bytes=_MAX_FRAME_BYTES)
    await frontend.until_used(*frontend.engines)
    # A larger message is a finding of the engine that received it.
    call = frontend.generate(2, n=_NUM_OUTPUTS, num_prompt_tokens=_NUM_LONG_PROMPT_TOKENS)
    await frontend.until(
        lambda: len(frontend.attempts_of(call)) == _NUM_OUTPUTS or call.is_over, f"{_NUM_OUTPUTS} entries"
    )
    expect(not call.is_over, f"{_NUM_OUTPUTS} entries", repr(call.error))
    attempt = frontend.attempts_of(call)[0]
    if "resume" in attempt.session.features:
        num_adds = len(attempt.session.adds)
        attempt.engine.wire.cut()
        await frontend.until(lambda: len(attempt.session.adds) > num_adds, "the ADDs again")
