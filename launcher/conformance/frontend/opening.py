"""Cases about hello, and about engines that are not to be used yet, or at all."""

from __future__ import annotations

import asyncio

from launcher.conformance.cases import Cases, Section, expect
from launcher.conformance.frontend_under_test import FrontendUnderTest

CASES: Cases[FrontendUnderTest] = Cases(Section.OPENING)

_NEWER_REVISION = 1_000_000
_NUM_REQUESTS = 8
_WATCHED_S = 1.0
# An incompatible engine is tried again after 5 s; sooner than this it should not be.
_LEAST_RETRY_S = 2.0


@CASES.must("hello is the first message, once, with ids of 1 to 128 characters and an epoch other than 0.")
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
    loading.restart(is_ready=False)
    await frontend.until(
        lambda: loading.session and loading.session.last_ack, "ack of a heartbeat while loading"
    )
    for call in [frontend.generate() for _ in range(_NUM_REQUESTS)]:
        attempt = await frontend.attempt_of(call)
        expect(attempt.engine is other, "ADDs at the loaded engine", "one at the engine that is loading")
    loading.become_ready()
    other.restart(is_ready=False)
    attempt = await frontend.attempt_of(frontend.generate())
    expect(attempt.engine is loading, "the ADD at the engine that is ready", "at the one that is loading")


@CASES.must("An engine whose min_peer_revision is above the frontend's is not used.")
async def incompatible_engine(frontend: FrontendUnderTest) -> None:
    newer, other = frontend.engines
    newer.restart(min_peer_revision=_NEWER_REVISION)
    await frontend.until(lambda: newer.sessions, "a hello at the newer engine")
    await frontend.until(lambda: newer.session is None, "the end of the stream by the frontend")
    for _ in range(_NUM_REQUESTS):
        # Over some time, in which the frontend may come back.
        await asyncio.sleep(_WATCHED_S / _NUM_REQUESTS)
        attempt = await frontend.attempt_of(frontend.generate())
        expect(attempt.engine is other, "ADDs at the compatible engine", "one at the newer engine")


@CASES.should("An incompatible engine is tried again only after seconds.")
async def incompatible_engine_again(frontend: FrontendUnderTest) -> None:
    newer, _ = frontend.engines
    newer.restart(min_peer_revision=_NEWER_REVISION)
    await frontend.until(lambda: newer.sessions, "a hello at the newer engine")
    await asyncio.sleep(_LEAST_RETRY_S)
    expect(len(newer.sessions) == 1, f"one hello in {_LEAST_RETRY_S:g} s", len(newer.sessions))
