"""Cases about engines that leave, and requests that move."""

from __future__ import annotations

import asyncio
from typing import Any

from triptych.engine.v1 import engine_pb2, session_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, Turn, expect
from triptych_conformance.frontend_under_test import Attempt, ClientCall, FrontendUnderTest
from triptych_conformance.played_engine import PlayedEngine
from triptych_kit.errors import Unavailable

CASES: Cases[FrontendUnderTest] = Cases(Section.ENDS)

_NUM_REQUESTS = 4
_MAX_TRIES = 16
# An engine as long as it answers no hello, loads, or has loaded and not said so yet.
_BEFORE_READY: tuple[dict[str, Any], ...] = (
    {"greets": False},
    {"is_ready": False, "state": session_pb2.ENGINE_STATE_LOADING},
    {"is_ready": False},
)


@CASES.must("A draining engine gets no further ADDs; what is left at its end moves.")
async def draining_engine(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    session = attempt.session
    session.send(draining=engine_pb2.Draining(deadline_ms=5000))
    seq = session.last_seq
    await frontend.until(lambda: session.last_ack >= seq, "ack of draining")
    for other in [frontend.generate() for _ in range(_NUM_REQUESTS)]:
        engine = (await frontend.attempt_of(other)).engine
        expect(engine is not attempt.engine, "new requests at the other engine", "one at the draining engine")
    session.end(Unavailable("conformance", reason="ENGINE_DRAINED"))
    await _must_move(frontend, call, attempt)


@CASES.must("What is left at an engine that ends its stream with OK moves.")
async def engine_that_leaves(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    attempt.session.end()
    await _must_move(frontend, call, attempt)


@CASES.must("After dead the requests of the engine move.")
async def failed_engine(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    dead = engine_pb2.Dead(reason="conformance", exit_code=1, handles=[attempt.entry.handle])
    attempt.session.send(dead=dead)
    attempt.session.end(Unavailable("conformance", reason="ENGINE_DEAD"))
    await _must_move(frontend, call, attempt)


@CASES.must("Where another epoch answers, the session is over: its requests move, and it is not resumed.")
async def other_epoch(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    await attempt.engine.restart()
    await _must_move(frontend, call, attempt)


@CASES.must("A request with output moves only to an engine of the same fingerprint.digest.")
async def other_fingerprint(frontend: FrontendUnderTest) -> None:
    engine, other = frontend.engines
    await other.restart(digest="d" * 64)
    await frontend.until_used(other)
    call, attempt = await _running(frontend, at=engine)
    engine.kill()
    # It forgets the ADD above. The frontend may end the call, or wait for an engine that fits.
    await engine.restart()
    await frontend.until(
        lambda: len(frontend.attempts_of(call)) > 0 or call.is_over, "another ADD, or an end"
    )
    if call.is_over:
        expect(call.error is not None, "an error at the client", "an end without the missing tokens")
        return
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.engine is engine, "an ADD at the engine with the same digest", "at the other one")
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])


@CASES.must(
    "Nothing is added before ready; an engine that dies before it is used when another process answers."
)
async def death_before_ready(frontend: FrontendUnderTest) -> None:
    dying, other = frontend.engines
    for changes in _BEFORE_READY:
        num_hellos = dying.num_hellos
        await dying.restart(**changes)
        await _hello(frontend, dying, num_hellos)
        for _ in range(_NUM_REQUESTS):
            await frontend.must_use(other)
        dying.kill()
        await frontend.must_use(other)
    await dying.restart()
    await frontend.until_used(dying)


@CASES.must("What waits and what runs at an engine that dies moves; what its client has cancelled does not.")
async def death_with_requests(frontend: FrontendUnderTest) -> None:
    running, attempt = await _running(frontend)
    engine = attempt.engine
    waiting, waiting_attempt = await _request_at(frontend, engine)
    cancelled, cancelled_attempt = await _request_at(frontend, engine)
    await cancelled.cancel()
    aborts, handle = cancelled_attempt.session.aborts, cancelled_attempt.entry.handle
    await frontend.until(lambda: handle in dict(aborts), "abort of the request that was cancelled")
    engine.kill()
    later = await frontend.attempt_of(waiting, after=waiting_attempt)
    expect(not later.output, "no output_token_ids of a request without output", later.output)
    seeds = [waiting_attempt.entry.request_seed, later.entry.request_seed]
    expect(seeds[0] == seeds[1], "the same request_seed", seeds)
    later.send([5, 6], is_first=True, ends=True)
    await frontend.must_finish(waiting, [5, 6])
    await _must_move(frontend, running, attempt)
    num_attempts = len(frontend.attempts_of(cancelled))
    expect(num_attempts == 1, "one ADD of the request that was cancelled", num_attempts)


@CASES.must("What is left at a draining engine that dies moves.")
async def death_while_draining(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    session = attempt.session
    session.send(draining=engine_pb2.Draining(deadline_ms=60_000))
    seq = session.last_seq
    await frontend.until(lambda: session.last_ack >= seq, "ack of draining")
    attempt.engine.kill()
    await _must_move(frontend, call, attempt)


@CASES.must("The requests of an engine that dies before it has answered a resume move.")
async def death_while_resuming(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    frontend.needs_resume(attempt)
    num_hellos = attempt.engine.num_hellos
    attempt.engine.change(greets=False)
    attempt.engine.wire.cut()
    await _hello(frontend, attempt.engine, num_hellos)
    attempt.engine.kill()
    await _must_move(frontend, call, attempt)


@CASES.should(
    "A frontend that stops sends goodbye, and leaves requests to others with `adopt` alone.", turn=Turn.LAST
)
async def goodbye(frontend: FrontendUnderTest) -> None:
    if frontend.stop_frontend is None:
        raise NotApplicable("it is not known how to stop the frontend: --stop COMMAND")
    sessions = [engine.session for engine in frontend.engines]
    stopping = asyncio.ensure_future(frontend.stop_frontend())
    try:
        await frontend.until(
            lambda: all(session is None or session.goodbye is not None for session in sessions),
            "goodbye at each engine",
        )
    finally:
        await stopping
    leaving = [
        session for session in sessions if session and session.goodbye and session.goodbye.leaves_adoptable
    ]
    expect(not leaving, "goodbye without leaves_adoptable where adopt is not named", "leaves_adoptable")


async def _hello(frontend: FrontendUnderTest, engine: PlayedEngine, num_hellos: int) -> None:
    """Wait until the engine has received more than `num_hellos` hellos."""
    await frontend.until(lambda: engine.num_hellos > num_hellos, "a hello")


async def _request_at(frontend: FrontendUnderTest, engine: PlayedEngine) -> tuple[ClientCall, Attempt]:
    """A request of four tokens that the frontend has sent to this engine."""
    for _ in range(_MAX_TRIES):
        call = frontend.generate(4)
        attempt = await frontend.attempt_of(call)
        if attempt.engine is engine:
            break
    expect(attempt.engine is engine, "a request at each engine", f"none of {_MAX_TRIES} at {engine.address}")
    return call, attempt


async def _running(
    frontend: FrontendUnderTest, *, at: PlayedEngine | None = None
) -> tuple[ClientCall, Attempt]:
    """A request of four tokens, two of which the client has."""
    if at is None:
        call = frontend.generate(4)
        attempt = await frontend.attempt_of(call)
    else:
        call, attempt = await _request_at(frontend, at)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    return call, attempt


async def _must_move(frontend: FrontendUnderTest, call: ClientCall, attempt: Attempt) -> None:
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.entry.attempt == attempt.entry.attempt + 1, "attempt + 1", later.entry.attempt)
    expect(later.output == [5, 6], "output_token_ids as received", later.output)
    expect(later.entry.request_seed == attempt.entry.request_seed, "the same request_seed", "another one")
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])
