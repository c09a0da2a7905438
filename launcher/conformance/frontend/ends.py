"""Cases about engines that leave, and requests that move."""

from __future__ import annotations

from launcher.conformance.cases import Cases, Section, expect
from launcher.conformance.frontend_under_test import Attempt, ClientCall, FrontendUnderTest
from launcher.conformance.played_engine import PlayedEngine
from service_kit.errors import Unavailable
from triptych.engine.v1 import engine_pb2

CASES: Cases[FrontendUnderTest] = Cases(Section.ENDS)

_NUM_REQUESTS = 4


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
    attempt.engine.restart()
    await _must_move(frontend, call, attempt)


@CASES.must("A request with output goes on at no engine of another fingerprint.")
async def other_fingerprint(frontend: FrontendUnderTest) -> None:
    call, attempt = await _running(frontend)
    (other,) = [engine for engine in frontend.engines if engine is not attempt.engine]
    other.restart(digest="d" * 64)
    await frontend.until_used()
    attempt.session.end()

    def later() -> list[PlayedEngine]:
        return [one.engine for one in frontend.attempts_of(call) if one.entry.attempt > attempt.entry.attempt]

    # It goes on where it was, as that engine is back at once, or it ends.
    await frontend.until(lambda: later() or call.is_over, "another ADD, or the end of the client's call")
    expect(other not in later(), "the request at an engine of the same fingerprint", "at one of another")
    other.restart()


async def _running(frontend: FrontendUnderTest) -> tuple[ClientCall, Attempt]:
    """A request of four tokens, two of which the client has."""
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
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
