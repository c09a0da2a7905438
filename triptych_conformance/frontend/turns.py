"""Cases about clients' sessions, whose turns engines with the feature input_segments keep."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.frontend_under_test import Attempt, FrontendUnderTest, SessionCall
from triptych_conformance.played_engine import EOS_TOKEN_ID, INPUT_SEGMENTS
from triptych_kit.errors import Unimplemented

CASES: Cases[FrontendUnderTest] = Cases(Section.REQUESTS)

_ABORT, _STOP = output_pb2.FINISH_REASON_ABORT, output_pb2.FINISH_REASON_STOP
_ADDED = [11, 12, 13]


@CASES.must("At an engine without the feature each turn is a request, with all the tokens before it.")
async def session_without_feature(frontend: FrontendUnderTest) -> None:
    call = await frontend.converse()
    attempt = await _first_turn(frontend, call)
    # One that is resumable is a finding of the engine's own.
    attempt.send([5, 6], is_first=True, ends=True)
    await _until_ends(frontend, call, 1)
    await _append(call)
    await _must_open(frontend, call, [*call.prompt, 5, 6, *_ADDED])


@CASES.must(
    "The next turn is a segment: the last token, unless it was an end-of-sequence token, and what is new."
)
async def next_segment(frontend: FrontendUnderTest) -> None:
    call, attempt = await _begin(frontend)
    # One that comes before the end of its turn is a finding of the engine's own.
    await _append(call)
    await _append(call)
    attempt.send([5], is_first=True)
    await frontend.until_tokens(call, 1)
    attempt.end_turn([6], is_first=False)
    await _must_continue(frontend, attempt, 1, [6, *_ADDED])
    attempt.end_turn([7, EOS_TOKEN_ID], reason=_STOP, eos_token_id=EOS_TOKEN_ID)
    await _must_continue(frontend, attempt, 2, _ADDED)
    attempt.end_turn([8])
    await _until_ends(frontend, call, 3)
    expect(call.tokens == [5, 6, 7, EOS_TOKEN_ID, 8], "all tokens at the client, once", call.tokens)


@CASES.must("The end of a client's input, or of its call, ends its request by an ADD that is not resumable.")
async def end_of_session(frontend: FrontendUnderTest) -> None:
    call, attempt = await _begin(frontend)
    attempt.end_turn([5, 6])
    await _until_ends(frontend, call, 1)
    await call.send(end={})
    end = await _segment(frontend, attempt, 1)
    expect(not end.resumable, "an ADD that is not resumable", repr(end))
    attempt.session.abort(end.handle)
    await frontend.until(lambda: call.is_over, "the end of the client's call")
    expect(call.error is None, "the status OK", repr(call.error))
    left = await frontend.converse()
    attempt = await _first_turn(frontend, left)
    attempt.end_turn([5, 6])
    await _until_ends(frontend, left, 1)
    await left.cancel()
    end = await _segment(frontend, attempt, 1)
    expect(not end.resumable, "an ADD that is not resumable", repr(end))


@CASES.must(
    "A client's cancel of a turn is `cancel_turn` of its segment, and its session goes on from its tokens."
)
async def cancelled_turn(frontend: FrontendUnderTest) -> None:
    call, attempt = await _begin(frontend)
    session, handle = attempt.session, attempt.entry.handle
    for number in range(2):
        attempt.send([5], is_first=True)
        await frontend.until_tokens(call, 2 * number + 1)
        await call.send(cancel_turn={})
        await frontend.until(lambda: session.cancels or handle in dict(session.aborts), "cancel_turn")
        expect(session.cancels == [(handle, number)], f"cancel_turn of segment {number}", session.cancels)
        expect(handle not in dict(session.aborts), "no abort", session.aborts)
        session.cancels.clear()
        attempt.end_turn([6], is_first=False, reason=_ABORT)
        await _until_ends(frontend, call, number + 1)
        expect(call.ends[-1] == _ABORT, "reason ABORT at the client", call.ends)
        await _append(call)
        await _must_continue(frontend, attempt, number + 1, [6, *_ADDED])


@CASES.must("A turn of a request that its engine has ended meanwhile is a new request, with all tokens.")
async def request_ended_between_turns(frontend: FrontendUnderTest) -> None:
    call, attempt = await _begin(frontend)
    attempt.end_turn([5, 6])
    await _until_ends(frontend, call, 1)
    attempt.session.abort(attempt.entry.handle)
    await _append(call)
    # A segment that crosses the end is answered by it.
    context = [*call.prompt, 5, 6, *_ADDED]
    opened = await _must_open(frontend, call, context)
    opened.end_turn([7])
    await _until_ends(frontend, call, 2)
    expect(call.tokens == [5, 6, 7], "all tokens at the client, once", call.tokens)


async def _begin(frontend: FrontendUnderTest) -> tuple[SessionCall, Attempt]:
    """A session whose first turn is sent to an engine with the feature."""
    for engine in frontend.engines:
        await engine.restart(features=("resume", INPUT_SEGMENTS))
    await frontend.until_connected()
    await frontend.until_used(*frontend.engines)
    call = await frontend.converse()
    attempt = await _first_turn(frontend, call)
    if INPUT_SEGMENTS not in attempt.session.features:
        raise NotApplicable(f"the frontend does not name the feature {INPUT_SEGMENTS}")
    expect(attempt.entry.resumable and not attempt.entry.segment, "a resumable ADD", repr(attempt.entry))
    return call, attempt


async def _first_turn(frontend: FrontendUnderTest, call: SessionCall) -> Attempt:
    await frontend.until(lambda: call.is_over or frontend.attempts_of(call), "an ADD or an error")
    if isinstance(call.error, Unimplemented):
        raise NotApplicable(f"the frontend does not serve sessions: {call.error}")
    return await frontend.attempt_of(call)


async def _append(call: SessionCall) -> None:
    await call.send(append={"token_ids": {"ids": _ADDED}})


async def _until_ends(frontend: FrontendUnderTest, call: SessionCall, num_ends: int) -> None:
    await frontend.until(
        lambda: len(call.ends) >= num_ends or call.is_over, f"the end of turn {num_ends} at the client"
    )
    expect(len(call.ends) == num_ends, f"turn_ended at the client {num_ends} times", repr(call.error))


def _segments(attempt: Attempt) -> list[add_pb2.AddEntry]:
    """The further ADDs of a request."""
    entries = attempt.session.adds
    return [entry for entry in entries if entry.handle == attempt.entry.handle and entry.segment]


async def _segment(frontend: FrontendUnderTest, attempt: Attempt, number: int) -> add_pb2.AddEntry:
    """The ADD of a request with this number, which must be about the same request."""
    await frontend.until(lambda: len(_segments(attempt)) >= number, f"segment {number}")
    entry, opening = _segments(attempt)[number - 1], attempt.entry
    expect(entry.segment == number, f"segment {number}", entry.segment)
    names = [(one.request_id, one.attempt) for one in (opening, entry)]
    expect(names[0] == names[1], f"request_id and attempt {names[0]}", names[1])
    return entry


async def _must_continue(
    frontend: FrontendUnderTest, attempt: Attempt, number: int, token_ids: Sequence[int]
) -> None:
    entry = await _segment(frontend, attempt, number)
    expect(entry.resumable, "a resumable ADD", repr(entry))
    expect(_ids(entry) == [*token_ids], f"prompt_token_ids {[*token_ids]}", _ids(entry))


async def _must_open(frontend: FrontendUnderTest, call: SessionCall, context: Sequence[int]) -> Attempt:
    """Wait for another request of these tokens."""
    await frontend.until(lambda: _opened(frontend, context) or call.is_over, "an ADD of all tokens")
    opened = _opened(frontend, context)
    expect(opened, "an ADD of all tokens", repr(call.error))
    return opened[0]


def _opened(frontend: FrontendUnderTest, context: Sequence[int]) -> list[Attempt]:
    return [
        Attempt(engine, session, entry)
        for engine in frontend.engines
        for session in engine.sessions
        for entry in session.adds
        if not entry.segment and _ids(entry) == [*context]
    ]


def _ids(entry: add_pb2.AddEntry) -> list[int]:
    column = entry.prompt_token_ids
    return list(struct.unpack(f"<{len(column) // 4}I", column))
