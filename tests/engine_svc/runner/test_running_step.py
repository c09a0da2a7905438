"""A step is over when its device has done it, whether or not it sampled. A stand-in is the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost
from engine_svc.core.step import StepPlan
from engine_svc.runner.running_step import RunningStep
from tests.connections import without_collections


class FakeEvent:
    """What happens on a device, in order."""

    log: ClassVar[list[str]] = []

    def record(self) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited for")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "log", [])
    return FakeEvent.log


def chunk_of_a_prompt() -> StepPlan:
    return StepPlan(3, request_ids=["a"], num_tokens=[8], num_computed_tokens=[0], samples=[False])


def test_a_chunk_that_samples_nothing_is_waited_for(log):
    step = RunningStep(chunk_of_a_prompt(), None, torch.device("cuda"))
    assert log == ["recorded"]
    result = step.result()
    assert (result.step_number, result.sampled) == (3, [[]])
    assert log == ["recorded", "waited for"]


def test_what_ranks_had_to_send_is_asked_behind_a_chunk_that_samples_nothing(log):
    RunningStep(chunk_of_a_prompt(), None, torch.device("cuda"), check=lambda: log.append("checked")).result()
    assert log == ["recorded", "waited for", "checked"]


def test_a_step_that_computes_nothing_is_over_at_once(log):
    RunningStep(StepPlan(3), None, torch.device("cuda")).result()
    assert log == []


@pytest.mark.parametrize(
    ("make_error", "kind"),
    [
        (lambda: RuntimeError("bad luck"), RuntimeError),
        (lambda: PeersLost("a rank is gone"), PeersLost),
        (lambda: torch.OutOfMemoryError("CUDA out of memory"), DeviceFull),
        (lambda: RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost),
    ],
)
@pytest.mark.usefixtures("log")
def test_an_error_of_the_device_keeps_nothing_alive_once_it_has_been_told(make_error, kind):
    held: list[weakref.ref[torch.Tensor]] = []

    def check() -> None:
        values = torch.zeros(1)
        held.append(weakref.ref(values))
        raise make_error()

    with without_collections():
        assert _kind_of_failure(check) is kind
        assert held[0]() is None


def _kind_of_failure(check: Callable[[], None]) -> type[Exception] | None:
    step = RunningStep(chunk_of_a_prompt(), None, torch.device("cuda"), check=check)
    try:
        step.result()
    except Exception as error:  # noqa: BLE001  Its type is what is asked for.
        return type(error)
    return None
