"""Requests that a policy preempts for waiting ones, before a step is planned."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.policies import POLICIES
from engine_svc.scheduler.policies.priority import ByPriority
from engine_svc.scheduler.stats import MAX_NUM_SEQS
from tests.engine_svc.scheduler.fakes import Stage, granted, request


class Impatient(ByPriority):
    """By priority; the last admitted makes room for any that waits, even for a less urgent one."""

    displaces = True

    def displaced(self, running: Sequence[Request], kv_cache: KVCache) -> Sequence[Request]:
        return running[-1:] if len(running) > 1 else ()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setitem(POLICIES, "impatient", Impatient)
    return Stage(policy="impatient", max_num_seqs=2)


def test_a_displaced_request_makes_room_in_the_same_step_and_waits_itself(stage: Stage):
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    stage.add(request("c", 8, priority=-1))
    plan = stage.step()
    assert (plan.preempted, plan.released, granted(plan)) == (["b"], ["b"], {"a": 1, "c": 8})
    assert stage.scheduler.waiting_ids == ["b"]
    assert stage.scheduler.stats().admission_limit == MAX_NUM_SEQS


def test_a_displaced_request_is_not_admitted_again_in_its_step(stage: Stage):
    stage.add(request("a", 8, priority=-1), request("b", 8, priority=-1))
    stage.step()
    stage.add(request("c", 8))
    # By its key it is the first.
    plan = stage.step()
    assert (plan.preempted, granted(plan)) == (["b"], {"a": 1, "c": 8})


def test_what_a_displaced_request_has_in_flight_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(POLICIES, "impatient", Impatient)
    stage = Stage(policy="impatient", max_num_seqs=2, async_scheduling=True)
    first, second = request("a", 8, max_tokens=4), request("b", 8, max_tokens=4)
    stage.add(first, second)
    plans = [stage.schedule()]
    stage.add(request("c", 8, max_tokens=4))
    plans.append(stage.schedule())
    assert plans[1].preempted == ["b"]
    for plan in plans:
        stage.update(plan)
    assert second.num_output_tokens == 1
    stage.step_until_idle()
    assert [done.num_output_tokens for done in (first, second)] == [4, 4]


def test_nothing_is_displaced_while_nothing_is_admitted(stage: Stage):
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    assert stage.step().preempted == []
