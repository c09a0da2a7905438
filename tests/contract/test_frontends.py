"""The conformance kit against frontends that were not written with ours: a right one, and many wrong ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack

import pytest

from benchmarks.rig.processes import LOOPBACK
from tests.contract.conftest import StartFrontend
from tests.contract.scripted_frontend import ScriptedFrontend
from tests.contract.wrong_frontends import WRONG_FRONTENDS
from triptych_conformance.check_frontend import check_frontend
from triptych_conformance.report import Outcome, Report
from triptych_kit.addresses import join_address

LIMIT_S = 60.0
# Where something is to be missing, this is waited for.
SHORT_LIMIT_S = 2.0
# Cases of what the frontend in JavaScript does not serve: adoption, embeddings, adapters, jobs and sessions.
NOT_SERVED_IN_JAVASCRIPT = {
    "request_to_adopt", "small_tensor", "large_tensor", "lost_blob", "named_adapter", "unannounced_adapter",
    "same_content", "turns_of_a_job", "engine_of_a_job", "hint_after_end", "hint_after_stop_string",
    "session_without_feature", "next_segment", "end_of_session", "cancelled_turn",
    "request_ended_between_turns",
}  # fmt: skip


async def checked(
    frontend_type: type[ScriptedFrontend], *, patience_s: float, only: Collection[str] = ()
) -> Report:
    frontends: list[ScriptedFrontend] = []

    async def start(engines: Sequence[str]) -> str:
        frontends.append(frontend_type(engines))
        return await frontends[0].start()

    async def stop() -> None:
        await frontends.pop().stop()

    try:
        return await check_frontend(
            [join_address(LOOPBACK, 0)] * 2,
            patience_s=patience_s,
            connect_s=LIMIT_S,
            only=only,
            start_frontend=start,
            stop_frontend=stop,
        )
    finally:
        for frontend in frontends:
            await frontend.stop()


@pytest.mark.chaos
async def test_the_scripted_frontend_keeps_every_rule() -> None:
    report = await checked(ScriptedFrontend, patience_s=LIMIT_S)
    assert [result for result in report.results if result.outcome is not Outcome.KEPT] == []


@pytest.mark.network
async def test_the_frontend_in_javascript_keeps_every_rule(javascript_frontend: StartFrontend) -> None:
    async with AsyncExitStack() as exits:

        async def start(engines: Sequence[str]) -> str:
            return await exits.enter_async_context(javascript_frontend(engines))

        report = await check_frontend(
            [join_address(LOOPBACK, 0)] * 2,
            patience_s=LIMIT_S,
            start_frontend=start,
            stop_frontend=exits.aclose,
        )
    broken = [result for result in report.results if result.outcome in (Outcome.FINDING, Outcome.WARNING)]
    assert broken == []
    assert {result.name for result in report.with_outcome(Outcome.NOT_APPLICABLE)} == NOT_SERVED_IN_JAVASCRIPT


# They wait for what a frontend does not do: about a minute together.
@pytest.mark.chaos
@pytest.mark.parametrize(("case", "wrong_frontend"), WRONG_FRONTENDS)
async def test_a_wrong_frontend_is_noticed_by_the_case_of_its_rule(
    case: str, wrong_frontend: type[ScriptedFrontend]
) -> None:
    report = await checked(wrong_frontend, patience_s=SHORT_LIMIT_S, only=[case])
    (result,) = report.results
    assert result.outcome in (Outcome.FINDING, Outcome.WARNING)
    assert "the check failed" not in result.detail, result.detail
