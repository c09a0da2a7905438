"""Runs the cases for a frontend against one that uses the engines that the kit plays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from triptych_conformance.cases import Case
from triptych_conformance.frontend import (
    adoption,
    ends,
    health,
    numbers,
    opening,
    requests,
    resuming,
    steps,
    tensors,
    transport,
    turns,
)
from triptych_conformance.frontend_under_test import FrontendUnderTest
from triptych_conformance.report import Report, Result, run_cases

_SECTIONS = (
    transport,
    opening,
    numbers,
    resuming,
    requests,
    turns,
    steps,
    adoption,
    health,
    ends,
    tensors,
)
FRONTEND_CASES: tuple[Case[FrontendUnderTest], ...] = tuple(
    case for section in _SECTIONS for case in section.CASES
)
NUM_ENGINES = 2


async def check_frontend(
    listen: Sequence[str],
    frontend: str = "",
    *,
    patience_s: float,
    connect_s: float | None = None,
    only: Collection[str] = (),
    start_frontend: Callable[[Sequence[str]], Awaitable[str]] | None = None,
    stop_frontend: Callable[[], Awaitable[object]] | None = None,
    on_result: Callable[[Result], object] = lambda result: None,
) -> Report:
    """Run all cases, or those of the names `only`, against the frontend whose public address is `frontend`.

    listen: where the two engines listen.  patience_s: how long an answer may take.  connect_s: the same of a
    session at each engine, by default as long.  start_frontend: starts one for the engines' addresses, and
    returns its own.  stop_frontend: stops it; without it that case does not apply.
    Raises a Finding if the frontend does not open a session at each engine.
    """
    peer = FrontendUnderTest(
        listen, patience_s=patience_s, connect_s=connect_s or patience_s, stop_frontend=stop_frontend
    )
    await peer.start()
    try:
        addresses = [engine.address for engine in peer.engines]
        if start_frontend is not None:
            frontend = await start_frontend(addresses)
        peer.connect(frontend)
        await peer.until_connected()

        async def check(case: Case[FrontendUnderTest]) -> None:
            was_kept = False
            try:
                await peer.begin_case()
                await case.check(peer)
                peer.check()
                was_kept = True
            finally:
                await peer.end_case(was_kept=was_kept)

        cases = [case for case in FRONTEND_CASES if not only or case.name in only]
        description = f"frontend {frontend} with engines at {', '.join(addresses)}"
        return await run_cases(cases, check, peer=description, on_result=on_result)
    finally:
        await peer.stop()
