"""The conformance kit against our own frontend: no rule of the specification is broken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.rig.processes import LOOPBACK
from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from frontend_svc.engines.connection import client
from frontend_svc.process.frontend import Frontend
from triptych_conformance.cases import Section
from triptych_conformance.check_frontend import FRONTEND_CASES, check_frontend
from triptych_conformance.played_engine import HEARTBEAT_S
from triptych_conformance.report import Outcome
from triptych_kit.addresses import join_address

LIMIT_S = 60.0
# They wait for an engine that is tried again only after 5 s.
SLOW_CASES = ["incompatible_engine_again"]
OTHER_CASES = [case.name for case in FRONTEND_CASES if case.name not in SLOW_CASES]


@pytest.mark.parametrize(
    "cases", [OTHER_CASES, pytest.param(SLOW_CASES, marks=pytest.mark.chaos)], ids=["others", "slow"]
)
async def test_our_frontend_keeps_every_rule(cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Cases follow each other faster than engines die: each would wait longer for its engines.
    monkeypatch.setattr(client, "_STEADY_S", 0.0)
    frontends: list[Frontend] = []

    async def start(engines: Sequence[str]) -> str:
        config = FrontendConfig(
            host=LOOPBACK,
            port=0,
            engine=tuple(engines),
            text_workers=1,
            # Suspects are kept from the last engine until this ends.
            reconnect_window_s=4.0,
        )
        # On a busy machine heartbeats are late.
        frontend = build_frontend(config, heartbeat_s=2 * HEARTBEAT_S)
        frontends.append(frontend)
        address = await frontend.servers.public.start()
        frontend.connect(address)
        return address

    async def stop() -> None:
        frontend = frontends.pop()
        await frontend.servers.public.stop(0)
        await frontend.close()

    try:
        report = await check_frontend(
            [join_address(LOOPBACK, 0)] * 2,
            patience_s=LIMIT_S,
            only=cases,
            start_frontend=start,
            stop_frontend=stop,
        )
    finally:
        if frontends:
            await stop()
    assert [result for result in report.results if result.outcome is not Outcome.KEPT] == []


def test_every_section_has_cases_and_names_are_unique() -> None:
    assert {case.section for case in FRONTEND_CASES} == set(Section)
    names = [case.name for case in FRONTEND_CASES]
    assert len(names) == len(set(names))
