"""Runs the cases for an engine against one that listens at an address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from triptych_conformance.cases import Case
from triptych_conformance.engine import (
    adoption,
    ends,
    health,
    numbers,
    opening,
    requests,
    resuming,
    steps,
    transport,
    turns,
)
from triptych_conformance.engine_under_test import EngineUnderTest, inspect_engine
from triptych_conformance.report import Report, Result, run_cases

_SECTIONS = (transport, opening, numbers, resuming, requests, turns, steps, adoption, health, ends)
ENGINE_CASES: tuple[Case[EngineUnderTest], ...] = tuple(
    case for section in _SECTIONS for case in section.CASES
)


async def check_engine(
    target: str,
    *,
    patience_s: float,
    connect_s: float | None = None,
    only: Collection[str] = (),
    drain: Callable[[], Awaitable[object]] | None = None,
    restart: Callable[[], Awaitable[object]] | None = None,
    on_result: Callable[[Result], object] = lambda result: None,
) -> Report:
    """Run all cases, or those of the names `only`.

    patience_s: how long an answer may take.  connect_s: the same of the first session, by default as long.
    drain, restart: see `EngineFacts`; without them their cases do not apply.
    Raises a Finding if the engine does not open a session at all.
    """
    facts = await inspect_engine(target, patience_s=connect_s or patience_s, drain=drain, restart=restart)
    facts.patience_s = patience_s

    async def check(case: Case[EngineUnderTest]) -> None:
        async with EngineUnderTest(facts) as engine:
            await case.check(engine)

    cases = [case for case in ENGINE_CASES if not only or case.name in only]
    return await run_cases(cases, check, peer=str(facts), on_result=on_result)
