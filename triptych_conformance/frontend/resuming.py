"""Cases about a session that outlives its stream."""

from __future__ import annotations

from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.frontend_under_test import Attempt, FrontendUnderTest

CASES: Cases[FrontendUnderTest] = Cases(Section.RESUMING)


@CASES.must(
    "A broken stream is resumed with the same ids, the engine's epoch and the last seq that was processed."
)
async def resume_after_cut(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(6)
    attempt = await frontend.attempt_of(call)
    frontend.needs_resume(attempt)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    last_seq, last_ack = attempt.session.last_seq, attempt.session.last_ack
    attempt.engine.wire.cut()
    attempt.send([7])
    await _resumed(frontend, attempt)
    first, second = attempt.session.hellos
    for name in ("frontend_id", "session_id", "frontend_epoch"):
        expect(getattr(first, name) == getattr(second, name), f"the same {name}", second)
    point = second.resume
    expect(point.engine_epoch == attempt.engine.epoch, "resume with the engine's epoch", point)
    # Heartbeats after the tokens may have been processed as well.
    expected = f"last_seq from {max(last_seq, last_ack)} to {attempt.session.last_seq}"
    expect(max(last_seq, last_ack) <= point.last_seq <= attempt.session.last_seq, expected, point)
    attempt.send([8, 9, 10], ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8, 9, 10])


@CASES.must("After a resume an ADD without first or end is sent again, unchanged.")
async def add_sent_again(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(2)
    attempt = await frontend.attempt_of(call)
    frontend.needs_resume(attempt)
    session = attempt.session
    session.adds.clear()
    attempt.engine.wire.cut()
    await _resumed(frontend, attempt)
    await frontend.until(lambda: frontend.attempts_of(call), "the ADD again")
    again = frontend.attempts_of(call)[0].entry
    for name in ("handle", "request_id", "attempt", "prompt_token_ids", "request_seed"):
        same = getattr(again, name) == getattr(attempt.entry, name)
        expect(same, f"the same {name} as before", getattr(again, name))
    attempt.send([5, 6], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6])


@CASES.must("After a resume an abort without an end is sent again.")
async def abort_sent_again(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(6)
    attempt = await frontend.attempt_of(call)
    frontend.needs_resume(attempt)
    attempt.send([5], is_first=True)
    await frontend.until_tokens(call, 1)
    await call.cancel()
    session, handle = attempt.session, attempt.entry.handle
    await frontend.until(lambda: handle in dict(session.aborts), "abort of the request")
    session.aborts.clear()
    attempt.engine.wire.cut()
    await _resumed(frontend, attempt)
    await frontend.until(lambda: handle in dict(session.aborts), "the abort again")


@CASES.must(
    "resume_ok false begins a new session; requests move on with attempt + 1 and the tokens received."
)
async def resume_refused(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    frontend.needs_resume(attempt)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    attempt.engine.change(resumes=False)
    attempt.engine.wire.cut()
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.entry.attempt == attempt.entry.attempt + 1, "attempt + 1", later.entry.attempt)
    expect(later.output == [5, 6], "output_token_ids as received", later.output)
    expect(later.entry.request_seed == attempt.entry.request_seed, "the same request_seed", "another one")
    max_tokens = later.entry.sampling.max_tokens
    expect(max_tokens == attempt.entry.sampling.max_tokens, "the client's max_tokens", max_tokens)
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])


async def _resumed(frontend: FrontendUnderTest, attempt: Attempt) -> None:
    hellos = attempt.session.hellos
    await frontend.until(
        lambda: len(hellos) > 1 or attempt.engine.sessions[-1] is not attempt.session, "a hello"
    )
    expect(len(hellos) > 1, "a hello that resumes the session", "one that begins another")
