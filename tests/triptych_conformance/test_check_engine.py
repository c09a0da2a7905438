"""The conformance kit against our own engine: no rule of the specification is broken."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from engine_svc.admin import announce
from engine_svc.build.features import wire_features
from engine_svc.config import EngineConfig
from engine_svc.core.step import StepPlan
from engine_svc.session import servicer
from tests.architecture.sources import ROOT
from tests.engine_svc.fakes import LIMIT_S
from tests.engine_svc.features.adapters.folders import write_adapter
from tests.engine_svc.session.service_rig import ServiceRig
from triptych_cli.services import embedded_model
from triptych_conformance.cases import Section
from triptych_conformance.check_engine import ENGINE_CASES, check_engine
from triptych_conformance.report import Outcome

_STEP_S = 0.001
_LOAD_S = 0.5
# Of unacknowledged messages, so that few fill it.
_MAX_REPLAY_BYTES = 200_000


async def test_our_engine_keeps_every_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", embedded_model(), seed=1)
    config = EngineConfig(
        model=str(embedded_model()),
        enable_lora=True,
        lora_modules=(f"mine={adapter}",),
        # The rig prepares no requests.
        enable_structured_output=False,
    )
    monkeypatch.setattr(servicer, "_HANDSHAKE_S", 1.0)
    monkeypatch.setattr(announce, "MAX_REPLAY_BYTES", _MAX_REPLAY_BYTES)
    rigs: list[ServiceRig] = []
    tasks: list[asyncio.Task[None]] = []

    async def start(listen: str) -> None:
        rig = ServiceRig(
            listen=listen,
            epoch=len(rigs) + 1,
            max_replay_bytes=_MAX_REPLAY_BYTES,
            features=wire_features(config),
        )
        rig.engine.replay_window_s = 2.0
        # The fake model computes nothing; a request takes as long as one of a small model.
        rig.executor.on_launch = _take_a_moment
        rigs.append(rig)
        await rig.start()

    async def restart() -> None:
        await rigs[-1].stop()
        await start(rigs[-1].address)
        tasks.append(asyncio.create_task(_load_later(rigs[-1])))

    async def drain() -> None:
        tasks.append(asyncio.create_task(rigs[-1].servicer.drain()))

    await start("127.0.0.1:0")
    try:
        await rigs[0].load()
        # The fake model has no logits.
        names = [case.name for case in ENGINE_CASES if case.name != "logprobs"]
        report = await check_engine(
            rigs[0].address, patience_s=LIMIT_S, only=names, drain=drain, restart=restart
        )
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)
        await rigs[-1].stop()
    assert [result for result in report.results if result.outcome is not Outcome.KEPT] == []


def test_sections_are_those_of_the_specification() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "protos/engine-session.md").read_text(), re.MULTILINE)
    assert {section.value for section in Section} <= set(headings)


def test_names_are_unique_and_each_section_but_tensors_has_cases() -> None:
    assert {case.section for case in ENGINE_CASES} == set(Section) - {Section.TENSORS}
    names = [case.name for case in ENGINE_CASES]
    assert len(names) == len(set(names))


async def _load_later(rig: ServiceRig) -> None:
    await asyncio.sleep(_LOAD_S)
    await rig.load()


def _take_a_moment(plan: StepPlan) -> None:
    time.sleep(_STEP_S)
