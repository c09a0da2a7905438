"""Cases about steps as a frontend reads them."""

from __future__ import annotations

import struct

import grpc

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.frontend_under_test import FrontendUnderTest
from triptych_kit.errors import InvalidArgument

CASES: Cases[FrontendUnderTest] = Cases(Section.STEPS)


@CASES.must("The client has each token once, in order, and the reason of the end.")
async def whole_answer(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    attempt.send([], is_first=True)
    attempt.send([5])
    attempt.send([6, 7])
    attempt.send([8], ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])
    reason = call.finished[0].reason
    expect(reason == output_pb2.FINISH_REASON_LENGTH, "reason LENGTH at the client", reason)


@CASES.must("A merged row counts as its steps one after the other, also with num_tokens_wide.")
async def merged_step(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(5)
    attempt = await frontend.attempt_of(call)
    parts = [step_pb2.StepParts(row=0, num_tokens=[1, 3])]
    attempt.send([5, 6, 7, 8], is_first=True, parts=parts)
    attempt.send([9], ends=True, num_tokens=b"", num_tokens_wide=struct.pack("<I", 1))
    await frontend.must_finish(call, [5, 6, 7, 8, 9])


@CASES.must("A message whose columns do not fit ends the stream; the request continues elsewhere.")
async def columns_that_do_not_fit(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(3)
    attempt = await frontend.attempt_of(call)
    session = attempt.session
    attempt.send([5], is_first=True)
    await frontend.until_tokens(call, 1)
    attempt.send([6], num_tokens=bytes([2]))
    await frontend.until(lambda: session.num_streams == 0, "the end of the stream by the frontend")
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.output == [5], "an ADD with the tokens before that message", later.output)
    later.send([6, 7], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7])


@CASES.should("An end with reason ERROR and a code is the status of the client's call.")
async def end_with_status(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(3)
    attempt = await frontend.attempt_of(call)
    code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    error = {"row": 0, "reason": output_pb2.FINISH_REASON_ERROR, "code": code, "message": "conformance"}
    attempt.send([], finished=[error])
    await frontend.until(lambda: call.is_over, "the end of the client's call")
    expect(isinstance(call.error, InvalidArgument), "INVALID_ARGUMENT at the client", repr(call.error))
