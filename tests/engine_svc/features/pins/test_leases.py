"""Pins of an operator: what is pinned, for how long, the limit, and who may call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator

import pytest

from engine_svc.admin.served_engine import Role
from engine_svc.admin.utility import UtilityService
from engine_svc.convert.feature import WireFeatures
from engine_svc.features.pins.estimator import FixedTtl
from engine_svc.features.pins.extras import ListPins, PinInfo, PinPrefix, ReleasePins
from engine_svc.features.pins.options import POLICY
from engine_svc.features.pins.scheduler import JobPins
from engine_svc.features.pins.wire import JobOfAdd
from tests.engine_svc.fakes import make_scheduler
from tests.engine_svc.features.pins.jobs import Jobs, made_for, prompt
from tests.engine_svc.loop.controlled_rig import Controlled, controlled
from tests.engine_svc.session.service_rig import make_entry
from triptych.engine.v1 import utility_pb2
from triptych_kit.clock import MonotonicClock
from triptych_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
)
from triptych_kit.telemetry.metrics import Metrics


def leased(
    jobs: Jobs, token_ids: list[int], *, ttl_s: float = 0.0, job_id: str = "", tenant: str = ""
) -> PinInfo:
    call = PinPrefix(token_ids, ttl_s, job_id, "", tenant)
    jobs.scheduler.note("", call, jobs.stage.now)
    assert call.pin is not None
    return call.pin


def refused(jobs: Jobs, token_ids: list[int], *, tenant: str = "") -> tuple[str, str]:
    call = PinPrefix(token_ids, 0.0, "", "", tenant)
    jobs.scheduler.note("", call, jobs.stage.now)
    assert call.failure is not None and call.pin is None
    return call.failure.code, call.failure.message


def released(jobs: Jobs, **names: str) -> int:
    call = ReleasePins(**names)
    jobs.scheduler.note("", call, jobs.stage.now)
    return call.num_blocks


def test_the_full_blocks_that_are_cached_stay_for_their_time():
    jobs = Jobs()
    jobs.run("", prompt(60))
    assert jobs.cache.num_used_blocks == 0
    pin = leased(jobs, [*prompt(48), *prompt(40, 900)], ttl_s=30.0)
    assert (pin.num_blocks, pin.left_s, jobs.cache.num_used_blocks) == (3, 30.0, 3)
    jobs.wait(29.0)
    assert jobs.cache.num_used_blocks == 3
    jobs.wait(1.0)
    assert jobs.outcomes == {"expired": 1}


def test_without_a_time_it_is_that_of_the_engine():
    jobs = Jobs()
    jobs.run("", prompt(60))
    assert leased(jobs, prompt(60)).left_s == 10.0


def test_what_is_not_cached_cannot_be_pinned():
    jobs = Jobs()
    assert refused(jobs, prompt(60)) == ("FAILED_PRECONDITION", "no full block of these tokens is cached")


def test_operators_pin_their_share_of_the_blocks_and_jobs_are_not_counted():
    jobs = Jobs(num_blocks=17)
    jobs.run("a", prompt(90, 900))
    jobs.run("", prompt(60))
    jobs.run("", prompt(100, 5000))
    leased(jobs, prompt(60))
    code, message = refused(jobs, prompt(100, 5000))
    assert code == "RESOURCE_EXHAUSTED"
    assert message == (
        "token_ids have 6 cached blocks, beside 3 that are pinned, the limit is 8, --max-pinned-share of the "
        "blocks"
    )
    leased(jobs, prompt(80, 5000))
    assert len(jobs.pinned) == 3


def test_for_a_tenant_they_pin_a_part_of_it():
    jobs = Jobs(num_blocks=25)
    jobs.run("", prompt(100))
    jobs.run("", prompt(100, 900))
    leased(jobs, prompt(64), tenant="a")
    code, message = refused(jobs, prompt(64, 900), tenant="a")
    assert (code, message.partition(", beside ")[2]) == (
        "RESOURCE_EXHAUSTED",
        "4 that are pinned, the limit is 6, --max-tenant-pinned-share of the blocks",
    )
    leased(jobs, prompt(32, 900), tenant="a")
    leased(jobs, prompt(64, 900), tenant="b")
    assert refused(jobs, prompt(64), tenant="c")[1].endswith(" --max-pinned-share of the blocks")


@pytest.mark.parametrize("name", ["max_pinned_share", "max_tenant_pinned_share"])
def test_the_shares_are_options_of_the_engine(name: str):
    jobs = Jobs(pins=made_for(POLICY, **{name: 0.0}))
    jobs.run("", prompt(60))
    message = refused(jobs, prompt(60), tenant="a")[1]
    assert f"the limit is 0, --{name.replace('_', '-')} of" in message


async def test_a_pin_beyond_a_share_is_refused_by_its_field():
    async with served(max_leased_share=0.0) as engine:
        with pytest.raises(ResourceExhausted) as refused:
            await engine.call(pin_blocks={"token_ids": list(range(40))})
    assert refused.value.metadata["fields"] == "pin_blocks.token_ids"


def test_pins_are_listed_in_the_order_in_which_they_expire():
    jobs = Jobs()
    jobs.run("", prompt(60))
    last, first = leased(jobs, prompt(60), ttl_s=50.0), leased(jobs, prompt(32), ttl_s=20.0, job_id="a")
    call = ListPins()
    jobs.scheduler.note("", call, jobs.stage.now)
    assert call.pins == [first, last]
    assert (first.job_id, first.pin_id != last.pin_id) == ("a", True)


def test_pins_are_released_by_id_by_job_and_together():
    jobs = Jobs()
    jobs.run("", prompt(60))
    pins = [leased(jobs, prompt(size), job_id=job) for size, job in ((16, "a"), (32, "b"), (48, ""))]
    # The other pins hold the same blocks.
    assert released(jobs, pin_id=pins[0].pin_id) == 0
    assert released(jobs, job_id="b") == 0
    assert released(jobs) == 3
    assert jobs.cache.num_used_blocks == 0
    assert released(jobs) == 0


def test_a_request_that_needs_them_gets_their_blocks_where_nothing_else_runs():
    jobs = Jobs(num_blocks=11)
    jobs.run("", prompt(80))
    leased(jobs, prompt(80), ttl_s=600.0)
    large = jobs.add("", prompt(140, 900))
    assert jobs.stage.step().request_ids == [large.request_id]


@contextlib.asynccontextmanager
async def served(max_leased_share: float = 0.5) -> AsyncIterator[Controlled]:
    """An engine with pins and some cached blocks of 4 tokens."""
    pins = JobPins(FixedTtl(10.0), MonotonicClock(), Metrics("engine"), max_leased_share=max_leased_share)
    features = WireFeatures([JobOfAdd(is_used=True)])
    async with controlled(scheduler=make_scheduler(features=[pins]), features=features) as engine:
        await engine.frontend.add(make_entry(1, prompt=list(range(40))))
        await engine.frontend.until_ended(1)
        yield engine


@contextlib.asynccontextmanager
async def unchanged(engine: Controlled) -> AsyncIterator[None]:
    """Check that a pin stays, and that there is no other."""
    asked = {"token_ids": list(range(40)), "ttl_s": 600.0, "job_id": "b"}
    (before,) = (await engine.call(pin_blocks=asked)).pins.pins
    yield
    (after,) = (await engine.call(list_pins={})).pins.pins
    assert (after.pin_id, after.num_blocks) == (before.pin_id, before.num_blocks)


async def test_an_operator_pins_lists_and_releases():
    async with served() as engine:
        asked = {"token_ids": list(range(40)), "ttl_s": 60.0, "job_id": "a"}
        (pin,) = (await engine.call(pin_blocks=asked)).pins.pins
        assert (pin.num_blocks, pin.job_id) == (10, "a")
        assert 50_000 < pin.remaining_ms <= 60_000
        (same,) = (await engine.call(list_pins={})).pins.pins
        assert same.pin_id == pin.pin_id
        assert (await engine.call(get_statistics={})).statistics.num_pinned_blocks == 10
        assert (await engine.call(release_pins={"pin_id": pin.pin_id})).num_released_blocks == 10
        await engine.call(pin_blocks=asked)
        assert (await engine.call(flush_pins={})).num_released_blocks == 10


@pytest.mark.parametrize(
    ("call", "field", "limit"),
    [
        ({"pin_blocks": {"token_ids": [1], "ttl_s": math.nan}}, "pin_blocks.ttl_s", "in 0..86400"),
        ({"pin_blocks": {"token_ids": [1], "ttl_s": -1.0}}, "pin_blocks.ttl_s", "in 0..86400"),
        ({"pin_blocks": {"token_ids": [1], "ttl_s": 1e6}}, "pin_blocks.ttl_s", "in 0..86400"),
        ({"pin_blocks": {"token_ids": [1], "job_id": "x" * 257}}, "pin_blocks.job_id", "at most 256"),
        ({"pin_blocks": {"token_ids": [1], "job_id": "a\0"}}, "pin_blocks.job_id", "can be printed"),
        ({"pin_blocks": {}}, "pin_blocks.token_ids", "at least 1"),
        ({"pin_blocks": {"token_ids": [1] * 1000}}, "pin_blocks.token_ids", "at most"),
        ({"pin_blocks": {"token_ids": [1, 1000]}}, "pin_blocks.token_ids", "below"),
        ({"release_pins": {}}, "release_pins.target", "pin_id or job_id"),
    ],
)
async def test_a_value_out_of_range_is_refused_by_its_field(call: dict[str, object], field: str, limit: str):
    async with served() as engine, unchanged(engine):
        with pytest.raises(InvalidArgument) as refused:
            await engine.call(**call)
    assert [name for name, _ in refused.value.violations] == [field]
    assert limit in refused.value.message


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ({"pin_blocks": {"token_ids": [5] * 40}}, FailedPrecondition),
        ({"release_pins": {"pin_id": "pin-9"}}, NotFound),
        ({"release_pins": {"job_id": "a"}}, NotFound),
    ],
)
async def test_what_is_not_there_is_refused(call: dict[str, object], kind: type[ServiceError]):
    async with served() as engine, unchanged(engine):
        with pytest.raises(kind):
            await engine.call(**call)


@pytest.mark.parametrize("name", ["pin_blocks", "release_pins", "list_pins", "flush_pins"])
async def test_only_an_operator_may_call(name: str):
    async with served() as engine:
        call = utility_pb2.UtilityCall(**{name: {}})
        with pytest.raises(PermissionDenied):
            UtilityService(engine.rig.engine).find(call, Role.FRONTEND)
