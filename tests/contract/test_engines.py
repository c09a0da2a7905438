"""The conformance kit against engines that were not written with ours: a right one, and many wrong ones."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.wrong_engines import SLOW_WRONG_ENGINES, WRONG_ENGINES
from triptych_conformance.check_engine import check_engine
from triptych_conformance.report import Outcome

# Of what the scripted engine does not serve.
NOT_APPLICABLE = {
    "logprobs",
    "announced_adapters",
    "other_content",
    "adopt_after_loss",
    "adopt_after_goodbye",
    "adopt_of_living_session",
    "adopt_of_unknown_request",
    "adopt_without_state",
}
LIMIT_S = 60.0
# Of unacknowledged messages, so that few fill it.
MAX_KEPT_BYTES = 200_000
# Where something is to be missing, this is waited for.
SHORT_LIMIT_S = 1.0


@contextlib.asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[str]:
    address = await engine.start()
    try:
        yield address
    finally:
        await engine.stop()


async def test_the_scripted_engine_keeps_every_rule() -> None:
    engine = ScriptedEngine(hello_limit_s=1.0, replay_window_s=2.0, max_kept_bytes=MAX_KEPT_BYTES)
    async with serving(engine) as address:
        report = await check_engine(address, patience_s=LIMIT_S, drain=engine.drain, restart=engine.restart)
    broken = [result for result in report.results if result.outcome in (Outcome.FINDING, Outcome.WARNING)]
    assert broken == []
    assert {result.name for result in report.with_outcome(Outcome.NOT_APPLICABLE)} == NOT_APPLICABLE


@pytest.mark.parametrize(
    ("case", "wrong_engine"),
    [*WRONG_ENGINES, *(pytest.param(*slow, marks=pytest.mark.chaos) for slow in SLOW_WRONG_ENGINES)],
)
async def test_a_wrong_engine_is_noticed_by_the_case_of_its_rule(
    case: str, wrong_engine: type[ScriptedEngine]
) -> None:
    engine = wrong_engine(max_kept_bytes=MAX_KEPT_BYTES)
    async with serving(engine) as address:
        report = await check_engine(
            address, patience_s=SHORT_LIMIT_S, connect_s=LIMIT_S, only=[case], restart=engine.restart
        )
    (result,) = report.results
    assert result.outcome in (Outcome.FINDING, Outcome.WARNING)
    assert "the check failed" not in result.detail, result.detail
