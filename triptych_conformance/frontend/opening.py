"""Cases about hello, and about engines that are not to be used yet, or at all."""

from __future__ import annotations

import asyncio

from triptych.engine.v1 import session_pb2
from triptych_conformance.cases import Cases, Section, expect
from triptych_conformance.frontend_under_test import FrontendUnderTest

CASES: Cases[FrontendUnderTest] = Cases(Section.OPENING)

_NEWER_REVISION = 1_000_000
_NUM_REQUESTS = 8
_WATCHED_S = 1.0
# An incompatible engine is tried again after 5 s; sooner than this it should not be.
_LEAST_RETRY_S = 2.0
_GRACE_MS = 1000


@CASES.must("hello is the first message, once, with valid ids and an epoch other than 0.")
async def first_message(frontend: FrontendUnderTest) -> None:
    # A hello that is wrong is a finding of the engine that received it.
    hellos = [session.hellos[0] for engine in frontend.engines for session in engine.sessions]
    expect(
        len({hello.session_id for hello in hellos}) == len(hellos), "a session_id for each session", hellos
    )
    expect(len({hello.frontend_epoch for hello in hellos}) == 1, "one frontend_epoch of the process", hellos)


@CASES.must("Nothing is added at an engine that is loading; after ready it is used.")
async def loading_engine(frontend: FrontendUnderTest) -> None:
    loading, other = frontend.engines
    await loading.restart(is_ready=False, state=session_pb2.ENGINE_STATE_LOADING)
    await frontend.until(
        lambda: loading.session and loading.session.last_ack, "ack of a heartbeat while loading"
    )
    for _ in range(_NUM_REQUESTS):
        await frontend.must_use(other)
    loading.become_ready()
    await other.restart(is_ready=False, state=session_pb2.ENGINE_STATE_LOADING)
    await frontend.must_use(loading)


@CASES.must("An engine whose min_peer_revision is above the frontend's is not used.")
async def incompatible_engine(frontend: FrontendUnderTest) -> None:
    newer, other = frontend.engines
    await newer.restart(min_peer_revision=_NEWER_REVISION)
    await frontend.until(lambda: newer.sessions, "a hello at the newer engine")
    await frontend.until(lambda: newer.session is None, "the end of the stream by the frontend")
    for _ in range(_NUM_REQUESTS):
        # Over some time, in which the frontend may come back.
        await asyncio.sleep(_WATCHED_S / _NUM_REQUESTS)
        await frontend.must_use(other)


@CASES.should("An incompatible engine is tried again only after seconds.")
async def incompatible_engine_again(frontend: FrontendUnderTest) -> None:
    newer, _ = frontend.engines
    await newer.restart(min_peer_revision=_NEWER_REVISION)
    await frontend.until(lambda: newer.sessions, "a hello at the newer engine")
    await asyncio.sleep(_LEAST_RETRY_S)
    expect(len(newer.sessions) == 1, f"one hello in {_LEAST_RETRY_S:g} s", len(newer.sessions))


@CASES.must("What belongs to a feature is not used where hello_ack does not name it.")
async def features_not_named(frontend: FrontendUnderTest) -> None:
    for engine in frontend.engines:
        await engine.restart(features=())
    await frontend.until_used(*frontend.engines)
    call = frontend.generate(4, orphan_grace_ms=_GRACE_MS)
    attempt = await frontend.attempt_of(call)
    for name in ("resume_state", "orphan_grace_ms"):
        seen = getattr(attempt.entry, name)
        expect(not seen, f"no {name} without the feature adopt", seen)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    sessions = attempt.engine.sessions
    attempt.engine.wire.cut()
    await frontend.until(lambda: sessions[-1] is not attempt.session, "another hello")
    hello = sessions[-1].hellos[0]
    expect(not hello.HasField("resume"), "no resume of a session without the feature", hello.resume)
    later = await frontend.attempt_of(call, after=attempt)
    expect(later.output == [5, 6], "output_token_ids as received", later.output)
