"""Numbers that others send leave room to count on from them."""

from __future__ import annotations

import pytest

from coordinator_svc.wire.convert import to_registration
from coordinator_svc.wire.number_limits import MAX_NUMBER, check_hint, check_report
from service_kit.errors import InvalidArgument
from tests.coordinator_svc.fakes import registration
from triptych.coordinator.v1 import coordinator_pb2, member_pb2


@pytest.mark.parametrize("field", ["seq", "wave", "generation", "step_number"])
def test_a_number_of_a_report_that_leaves_no_room_to_count_on_is_refused(field: str) -> None:
    check_report(coordinator_pb2.EngineReport(**{field: MAX_NUMBER}))
    for value in (MAX_NUMBER + 1, 2**64 - 1):
        with pytest.raises(InvalidArgument, match=f"{field} is {value}, the limit is {2**62}") as refused:
            check_report(coordinator_pb2.EngineReport(**{field: value}))
        assert [name for name, _ in refused.value.violations] == [f"report.{field}"]


def test_the_step_number_of_a_load_is_bounded_too() -> None:
    report = coordinator_pb2.EngineReport(load=member_pb2.EngineLoad(step_number=2**63))
    with pytest.raises(InvalidArgument, match=f"load.step_number is {2**63}") as refused:
        check_report(report)
    assert [name for name, _ in refused.value.violations] == ["report.load.step_number"]


def test_the_wave_of_a_registration_and_of_a_hint_is_bounded() -> None:
    with pytest.raises(InvalidArgument, match=f"wave is {2**63}, the limit is {2**62}"):
        to_registration(registration(wave=2**63))
    assert to_registration(registration(wave=MAX_NUMBER)).engine_id == "engine-0"
    with pytest.raises(InvalidArgument, match=f"wave is {2**63}, the limit is {2**62}"):
        check_hint(coordinator_pb2.FirstRequestWhilePaused(wave=2**63))
    check_hint(coordinator_pb2.FirstRequestWhilePaused(wave=MAX_NUMBER))
