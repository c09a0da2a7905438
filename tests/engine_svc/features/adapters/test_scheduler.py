"""Limits of adapters: in a step, in memory, and how often a request without a slot is overtaken."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.features.adapters.extras import AdapterUse, Pins
from engine_svc.features.adapters.scheduler import (
    MAX_OVERTAKING,
    MAX_OVERTAKING_OF_LOADING,
    AdapterLimits,
)
from engine_svc.features.sched_trace.records import Setup
from engine_svc.loop.preparation import Preparations
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerContext
from tests.engine_svc.features.sched_trace.tracing import Tracing, replayed
from tests.engine_svc.scheduler.fakes import Stage, request
from triptych_kit.clock import FakeClock
from triptych_kit.telemetry.metrics import Metrics

NO_PINS = Pins()


def limits(max_adapters: int, max_loaded: int = 1000, metrics: Metrics | None = None) -> AdapterLimits:
    context = SchedulerContext(
        FakeClock(),
        lambda work: work(),
        SchedulerConfig(64),
        CacheConfig(10, (FullAttention(4),)),
        metrics or Metrics("engine"),
    )
    return AdapterLimits(max_adapters, max_loaded, context)


def with_adapter(
    number: int, adapter: str, max_tokens: int = 3, *, is_prepared: bool = True, pins: Pins = NO_PINS
) -> Request:
    made = request(f"r{number}", 4, max_tokens=max_tokens, arrival_at=number)
    if adapter:
        use = AdapterUse(adapter, f"/{adapter}", adapter, pins)
        made.extra_keys = (use.cache_key,)
        if not is_prepared:
            made.extras[AdapterUse] = use
    return made


def test_a_step_has_at_most_so_many_different_adapters_and_the_model_counts_for_none():
    stage = Stage(features=[limits(2)])
    stage.add(*(with_adapter(number, name) for number, name in enumerate(("a", "b", "c", "a", "", "b"))))
    assert stage.schedule().request_ids == ["r0", "r1", "r3", "r4", "r5"]


def test_one_without_a_slot_is_overtaken_so_often_and_then_others_wait_for_it():
    stage = Stage(features=[limits(1)], max_num_seqs=3)
    stage.add(with_adapter(0, "a", max_tokens=200), with_adapter(1, "b"))
    stage.add(*(with_adapter(number, "a") for number in range(2, 300)))
    order: list[str] = []
    while "r1" not in order:
        plan = stage.schedule()
        order += [admitted.request_id for admitted in plan.admitted]
        stage.update(plan)
    # All but the first and itself.
    assert len(order) - 2 == MAX_OVERTAKING
    while stage.scheduler.has_work:
        stage.update(stage.schedule())
    assert stage.scheduler.waiting_ids == []


def test_requests_spend_the_budget_only_while_more_adapters_are_in_use_than_fit_a_step():
    stage = Stage(features=[limits(2)])
    first, second = with_adapter(0, "a"), with_adapter(1, "b")
    stage.add(first, second, with_adapter(2, "a"))
    assert (first.num_budgets, second.num_budgets) == (0, 0)
    third, plain = with_adapter(3, "c"), with_adapter(4, "")
    stage.add(third, plain)
    assert [each.num_budgets for each in (first, second, third, plain)] == [1, 1, 1, 0]
    stage.scheduler.abort(["r1"], now=1.0)
    assert [each.num_budgets for each in (first, second, third, plain)] == [0, 0, 0, 0]
    assert stage.schedule().request_ids == ["r0", "r2", "r3", "r4"]


class NotedRanks:
    num_preparing = 1

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []
        self.dropped: list[str] = []

    def prepare(self, number, request_id, extras, account, weight) -> None:
        self.sent.append((number, request_id))

    def drop_prepared(self, request_id: str) -> None:
        self.dropped.append(request_id)

    def stop_preparing(self) -> None: ...

    @property
    def ids(self) -> list[str]:
        return [request_id for _, request_id in self.sent]


@pytest.fixture
def ranks() -> NotedRanks:
    return NotedRanks()


class LoadingStage(Stage):
    metrics: Metrics


def loading_stage(
    ranks: NotedRanks, max_adapters: int, max_loaded: int, max_num_seqs: int = 64
) -> tuple[LoadingStage, Preparations]:
    metrics = Metrics("engine")
    feature = limits(max_adapters, max_loaded, metrics)
    preparations = Preparations(ranks, FakeClock(), [feature])
    stage = LoadingStage(features=[feature, preparations], max_num_seqs=max_num_seqs)
    stage.metrics = metrics
    return stage, preparations


def settle(stage: Stage | Tracing, preparations: Preparations, ranks: NotedRanks, besides: str = "") -> None:
    for number, request_id in ranks.sent:
        if request_id != besides:
            preparations.note(number, None)
    for settled in preparations.take_settled():
        stage.scheduler.unblock(settled.request_id, "adapter")


def test_adapters_are_loaded_in_order_while_there_is_room_in_memory(ranks):
    stage, preparations = loading_stage(ranks, max_adapters=2, max_loaded=2)
    names = ["a", "b", "c", "a", "d", ""]
    stage.add(*(with_adapter(number, name, is_prepared=False) for number, name in enumerate(names)))
    # The second request with "a" does not overtake the one with "c", which waits for room.
    assert ranks.ids == ["r0", "r1"]
    settle(stage, preparations, ranks)
    plan = stage.schedule()
    assert plan.request_ids == ["r0", "r1", "r5"]
    stage.update(plan)
    stage.scheduler.abort(["r1"], now=1.0)
    assert ranks.dropped == ["r1"]
    assert ranks.ids == ["r0", "r1", "r2", "r3"]
    stage.scheduler.abort(["r4"], now=1.0)
    stage.scheduler.abort(["r2"], now=1.0)
    assert ranks.ids == ["r0", "r1", "r2", "r3"]
    stage.add(with_adapter(6, "e", is_prepared=False))
    assert ranks.ids[-1] == "r6"


def test_an_adapter_whose_pin_has_ended_takes_no_room_that_others_wait_for(ranks):
    stage, preparations = loading_stage(ranks, max_adapters=1, max_loaded=2)
    for number, name in enumerate("abcd"):
        pins = Pins(number + 1, (name,))
        stage.add(with_adapter(number, name, is_prepared=False, pins=pins))
        settle(stage, preparations, ranks)
        stage.scheduler.abort([f"r{number}"], now=1.0)
    assert ranks.ids == ["r0", "r1", "r2", "r3"]


def test_the_names_of_running_and_waiting_adapters_are_measured(ranks):
    stage, preparations = loading_stage(ranks, max_adapters=1, max_loaded=2)
    stage.add(*(with_adapter(number, name, is_prepared=False) for number, name in enumerate("abc")))
    settle(stage, preparations, ranks)
    plan = stage.schedule()
    family = stage.metrics.families["triptych_engine_adapter_requests_info"]
    assert list(family.read()) == [("1", "a", "b,c")]
    stage.update(plan)
    stage.scheduler.abort(["r0", "r2"], now=1.0)
    settle(stage, preparations, ranks)
    stage.schedule()
    assert list(family.read()) == [("1", "b", "")]


def test_the_adapter_of_a_step_that_was_rolled_back_is_a_waiting_one(ranks):
    stage, preparations = loading_stage(ranks, max_adapters=1, max_loaded=2)
    stage.add(with_adapter(0, "a", is_prepared=False))
    settle(stage, preparations, ranks)
    stage.schedule()
    stage.scheduler.withdraw(now=1.0)
    family = stage.metrics.families["triptych_engine_adapter_requests_info"]
    assert list(family.read()) == [("1", "", "a")]


def test_many_requests_that_wait_for_room_are_none_that_are_being_prepared(ranks):
    stage, preparations = loading_stage(ranks, max_adapters=1, max_loaded=1)
    stage.add(*(with_adapter(number, f"a{number}", is_prepared=False) for number in range(3000)))
    assert ranks.ids == ["r0"]
    assert preparations.take_settled() == []
    for number in range(2999):
        stage.scheduler.abort([f"r{number}"], now=1.0)
    assert ranks.ids == [f"r{number}" for number in range(3000)]


def test_one_whose_adapter_is_being_loaded_is_overtaken_so_often_and_then_others_wait(ranks):
    stage, preparations = loading_stage(ranks, max_adapters=4, max_loaded=4)
    stage.add(with_adapter(0, "a", is_prepared=False))
    settle(stage, preparations, ranks)
    stage.add(with_adapter(1, "b", is_prepared=False))
    stage.add(*(with_adapter(number, "a", is_prepared=False) for number in range(2, 100)))
    assert len(ranks.ids) - 2 == MAX_OVERTAKING_OF_LOADING
    settle(stage, preparations, ranks)
    assert len(ranks.ids) == 100


@pytest.mark.parametrize("enter", [True, False], ids=["entered", "prepared alone"])
def test_those_that_entered_while_its_adapter_was_loaded_count_where_it_has_no_slot(ranks, enter):
    stage, preparations = loading_stage(ranks, max_adapters=1, max_loaded=4, max_num_seqs=100)
    stage.add(with_adapter(0, "a", max_tokens=200, is_prepared=False))
    settle(stage, preparations, ranks)
    stage.update(stage.schedule())
    stage.add(with_adapter(1, "b", is_prepared=False))
    stage.add(*(with_adapter(number, "a", max_tokens=200, is_prepared=False) for number in range(2, 100)))
    settle(stage, preparations, ranks, besides="r1")
    if enter:
        plan = stage.schedule()
        assert len(plan.admitted) == MAX_OVERTAKING_OF_LOADING
        stage.update(plan)
    settle(stage, preparations, ranks)
    settle(stage, preparations, ranks)  # of those that were held until then
    num_admitted = 0
    while admitted := (plan := stage.schedule()).admitted:
        num_admitted += len(admitted)
        stage.update(plan)
    assert num_admitted == MAX_OVERTAKING - (MAX_OVERTAKING_OF_LOADING if enter else 0)


def test_a_replay_counts_those_that_entered_while_an_adapter_was_loaded(ranks):
    feature = limits(max_adapters=1, max_loaded=4)
    preparations = Preparations(ranks, FakeClock(), [feature])
    scheduler = SchedulerConfig(max_model_len=2048, max_num_batched_tokens=2048, max_num_seqs=100)
    tracing = Tracing(Setup(scheduler, CacheConfig(1000, (FullAttention(16),))), [feature, preparations])
    adapters = ["a", "b", *["a"] * 98]
    for number, adapter in enumerate(adapters):
        tracing.scheduler.add(with_adapter(number, adapter, max_tokens=200, is_prepared=False))
        if number == 0:
            settle(tracing, preparations, ranks)
            tracing.step()
    settle(tracing, preparations, ranks, besides="r1")
    tracing.step()
    settle(tracing, preparations, ranks)
    settle(tracing, preparations, ranks)
    while tracing.step().admitted:
        continue
    records = tracing.end()
    records[0]["trace"]["config"]["features"] = {"adapters": {"max_adapters": 1}}
    assert replayed(records).difference is None
