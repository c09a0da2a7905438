"""Cases about engines that are silent, or whose loop hangs."""

from __future__ import annotations

from triptych.engine.v1 import session_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.frontend_under_test import FrontendUnderTest
from triptych_conformance.played_engine import HEARTBEAT_S

CASES: Cases[FrontendUnderTest] = Cases(Section.HEALTH)

_SILENCE_S = 1.5


@CASES.should("A stream over which nothing comes for 1.5 s is silent: it is resumed, or its requests move.")
async def silent_engine(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    attempt.engine.wire.freeze()
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.engine is not attempt.engine, "the request at the other engine", "at the silent one")
    expect(later.output == [5, 6], "output_token_ids as received", later.output)
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])


@CASES.must("Heartbeats keep a stream alive on which nothing else comes.")
async def idle_stream(frontend: FrontendUnderTest) -> None:
    sessions = [engine.session for engine in frontend.engines]
    last = [session.last_seq for session in sessions if session is not None]
    num_beats = 2 + int(_SILENCE_S / 0.5)
    await frontend.until(
        lambda: all(
            session is not None and session.last_ack >= before + num_beats
            for session, before in zip(sessions, last, strict=True)
        ),
        f"acknowledgements of {num_beats} heartbeats",
    )
    expect(sessions == [engine.session for engine in frontend.engines], "the same sessions", "others")


@CASES.should(
    "An engine with work whose step exceeds its budget is hung: its requests move, its late rows are dropped."
)
async def hung_engine(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    attempt.engine.change(heartbeat=busy(step_number=3, age_ms=60_000, budget_ms=100))
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.engine is not attempt.engine, "the request at the other engine", "at the hung one")
    attempt.send([99, 99])
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])


@CASES.must("A step within its announced budget is no hang, however long no output comes.")
async def slow_step(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    attempt.engine.change(heartbeat=busy(step_number=3, age_ms=20_000, budget_ms=60_000))
    session, seq = attempt.session, attempt.session.last_seq
    num_beats = 2 + int(_SILENCE_S / HEARTBEAT_S)
    await frontend.until(
        lambda: session.last_ack >= seq + num_beats or len(frontend.attempts_of(call)) > 1,
        f"acknowledgements of {num_beats} heartbeats",
    )
    num_attempts = len(frontend.attempts_of(call))
    expect(num_attempts == 1, "the request at the engine that is slow", "at another one")
    expect(len(session.hellos) == 1, "the same stream as before", "another one")
    attempt.send([7, 8], ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])


def busy(*, step_number: int, age_ms: int, budget_ms: int) -> session_pb2.Heartbeat:
    """A heartbeat during a step."""
    return session_pb2.Heartbeat(
        step_number=step_number, step_started_age_ms=age_ms, step_budget_ms=budget_ms, has_work=True
    )
