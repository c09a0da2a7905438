"""What an operator does to an engine with a fake model, and what becomes of its requests."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from engine_svc.runner.control import Refused
from engine_svc.runner.sleep import WeightsLost
from service_kit.errors import FailedPrecondition, ServiceError
from tests.engine_svc.loop.controlled_rig import (
    ABORT,
    KEEP,
    NEW_DIGEST,
    WAIT,
    Controlled,
    controlled,
    running,
    tokens_of,
)
from tests.engine_svc.session.service_rig import ABORT as ENDED_BY_ABORT
from tests.engine_svc.session.service_rig import LENGTH, make_entry


async def test_keep_holds_streams_where_they_are_and_resume_continues_them():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        pausing = asyncio.create_task(engine.pause(KEEP))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await pausing
        await engine.pass_by()
        num_launched, num_tokens = engine.rig.executor.num_launched, len(engine.frontend.tokens[1])
        assert 0 < num_tokens < 30
        await engine.frontend.add(make_entry(2, max_tokens=5))
        await engine.pass_by()
        assert engine.rig.executor.num_launched == num_launched
        assert len(engine.frontend.tokens[1]) == num_tokens
        await engine.resume()
        await engine.frontend.until_ended(1, 2)
    assert engine.frontend.tokens == {1: tokens_of(1, 30), 2: tokens_of(2, 5)}
    assert engine.frontend.finished == {1: [LENGTH], 2: [LENGTH]}


async def test_a_request_queued_during_keep_and_aborted_ends_with_no_token():
    async with controlled() as engine:
        await engine.pause(KEEP)
        await engine.frontend.add(make_entry(1))
        await engine.frontend.abort(1)
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT]}
    assert engine.frontend.tokens.get(1, []) == []


async def test_a_request_that_a_pause_holds_ends_at_its_deadline():
    async with controlled() as engine:
        await engine.pause(KEEP)
        entry = make_entry(1)
        entry.remaining_ms = 50
        await engine.frontend.add(entry)
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT]}


async def test_abort_ends_what_runs_and_waits_and_what_comes_waits_for_resume():
    async with controlled() as engine:
        await running(engine, *range(1, 21), num_tokens=100)
        pausing = asyncio.create_task(engine.pause(ABORT))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await pausing
        await engine.frontend.until_ended(*range(1, 21))
        num_launched = engine.rig.executor.num_launched
        await engine.frontend.add(make_entry(30))
        await engine.pass_by()
        assert engine.rig.executor.num_launched == num_launched
        assert 30 not in engine.frontend.tokens
        await engine.resume()
        await engine.frontend.until_ended(30)
    assert all(engine.frontend.finished[handle] == [ENDED_BY_ABORT] for handle in range(1, 21))
    assert engine.frontend.tokens[30] == tokens_of(30, 5)


async def test_wait_returns_when_the_ten_tokens_are_done_and_admits_nobody_meanwhile():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=10)
        pausing = asyncio.create_task(engine.pause(WAIT))
        await engine.frontend.add(make_entry(2))
        await engine.frontend.flush()
        assert not pausing.done()
        engine.rig.executor.gate.set()
        await pausing
        await engine.frontend.until_ended(1)
        assert engine.frontend.tokens == {1: tokens_of(1, 10)}
        await engine.resume()
        await engine.frontend.until_ended(2)
    assert engine.frontend.tokens[2] == tokens_of(2, 5)


async def test_sleep_gives_memory_back_and_held_streams_go_on_after_wake():
    async with controlled() as engine:
        await running(engine, 1, 2, num_tokens=30)
        sleeping = asyncio.create_task(engine.call(sleep={"level": 2, "mode": KEEP}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await sleeping
        assert (await engine.call(is_sleeping={})).is_sleeping
        await engine.call(wake={"tags": ["weights"]})
        await engine.frontend.add(make_entry(3))
        await engine.pass_by()
        assert (await engine.call(is_sleeping={})).is_sleeping
        await engine.call(wake={})
        await engine.frontend.until_ended(1, 2, 3)
    assert engine.runners.asked == [("sleep", 2), ("wake", {"weights"}), ("wake", {"kv_cache"})]
    assert engine.frontend.tokens == {1: tokens_of(1, 30), 2: tokens_of(2, 30), 3: tokens_of(3, 5)}


async def test_sleep_ends_running_requests_where_no_mode_is_asked_for():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=100)
        sleeping = asyncio.create_task(engine.call(sleep={"level": 1}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        await sleeping
        await engine.frontend.until_ended(1)
    assert engine.frontend.finished == {1: [ENDED_BY_ABORT]}


async def test_a_cache_in_use_is_reset_only_where_running_requests_may_lose_their_blocks():
    async with controlled() as engine:
        await running(engine, 1, 2, num_tokens=30)
        resetting = asyncio.create_task(engine.call(reset_prefix_cache={}))
        forcing = asyncio.create_task(engine.call(reset_prefix_cache={"reset_running": True}))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        with pytest.raises(FailedPrecondition, match="2 of them run"):
            await resetting
        assert (await forcing).reset_prefix_cache
        await engine.frontend.until_ended(1, 2)
    assert engine.frontend.tokens == {1: tokens_of(1, 30), 2: tokens_of(2, 30)}


async def test_the_hit_rate_is_0_after_a_pause_that_clears_the_cache():
    async with controlled() as engine:
        prompt = list(range(40))
        for handle, clears in (1, False), (2, True), (3, False):
            await engine.pause(KEEP, clear_cache=clears)
            await engine.resume()
            await engine.frontend.add(make_entry(handle, prompt=prompt))
            await engine.frontend.until_ended(handle)
    firsts = [first for message in engine.frontend.heard for first in message.step.first]
    assert [first.num_cached_tokens for first in firsts] == [0, 0, 36]


async def test_weights_are_replaced_only_where_nothing_runs_or_all_is_held():
    async with controlled() as engine:
        await running(engine, 1, num_tokens=30)
        updating = asyncio.create_task(engine.call(update_weights={"path": "/models/new"}))
        pausing = asyncio.create_task(engine.pause(KEEP))
        await engine.let_calls_begin()
        engine.rig.executor.gate.set()
        with pytest.raises(FailedPrecondition, match="1 requests run: pause the engine first"):
            await updating
        await pausing
        await engine.call(update_weights={"path": "/models/new", "version": "step-2"})
        await engine.resume()
        await engine.frontend.until_ended(1)
        assert (await engine.call(get_weight_version={})).weight_version == "step-2"
        await engine.call(update_weights={})
    assert engine.runners.asked == [("reload_weights", Path("/models/new")), ("reload_weights", None)]
    assert engine.weights == [(Path("/models/new"), NEW_DIGEST)] * 2
    assert engine.frontend.tokens[1] == tokens_of(1, 30)


async def test_weights_that_are_loaded_while_it_sleeps_are_awake():
    async with controlled() as engine:
        await engine.call(sleep={"level": 2})
        await engine.call(update_weights={"path": "/models/new"})
        await engine.call(wake={})
    assert engine.runners.asked[2:] == [("wake", {"kv_cache"})]


async def test_a_refused_update_leaves_an_engine_that_runs():
    async with controlled() as engine:
        engine.runners.error = Refused("/models/new is not a folder")
        with pytest.raises(FailedPrecondition, match="/models/new is not a folder"):
            await engine.call(update_weights={"path": "/models/new"})
        assert not (await engine.call(is_sleeping={})).is_sleeping
        await engine.frontend.add(make_entry(1))
        await engine.frontend.until_ended(1)


async def lose_weights(engine: Controlled, error: Exception) -> ServiceError:
    """Have an update lose them, and a request come; what the operator is told."""
    engine.runners.error = error
    with pytest.raises(ServiceError) as caught:
        await engine.call(update_weights={"path": "/models/new", "version": "step-2"})
    await engine.frontend.add(make_entry(1))
    await engine.pass_by()
    assert (await engine.call(is_sleeping={})).is_sleeping
    assert engine.frontend.tokens.get(1, []) == []
    return caught.value


LOSSES = [
    (WeightsLost("/models/first cannot be read"), "WEIGHTS_LOST", "wake it.*first cannot be read"),
    (KeyError("rope"), "INTERNAL", "see the engine's log"),
]


@pytest.mark.parametrize(("error", "reason", "told"), LOSSES)
async def test_without_weights_requests_wait_until_they_are_woken(error, reason, told):
    async with controlled() as engine:
        failure = await lose_weights(engine, error)
        assert failure.reason == reason
        assert re.search(told, failure.message)
        engine.runners.error = Refused("/models/first cannot be read")
        with pytest.raises(FailedPrecondition, match="cannot be read"):
            await engine.call(wake={})
        assert (await engine.call(is_sleeping={})).is_sleeping
        await engine.call(wake={})
        await engine.frontend.until_ended(1)
        assert (await engine.call(get_weight_version={})).weight_version == ""
    assert engine.runners.asked == [("wake", {"weights"})]
    assert engine.frontend.tokens == {1: tokens_of(1, 5)}
    assert engine.weights == []


async def test_without_weights_others_can_be_loaded():
    async with controlled() as engine:
        await lose_weights(engine, WeightsLost("/models/first cannot be read"))
        await engine.call(update_weights={"path": "/models/new", "version": "step-3"})
        await engine.frontend.until_ended(1)
        assert not (await engine.call(is_sleeping={})).is_sleeping
    assert engine.weights == [(Path("/models/new"), NEW_DIGEST)]


async def test_a_paused_engine_that_lost_its_weights_is_paused_again_after_waking():
    async with controlled() as engine:
        await engine.pause(KEEP)
        await lose_weights(engine, WeightsLost("/models/first cannot be read"))
        with pytest.raises(FailedPrecondition, match="wake it first"):
            await engine.resume()
        await engine.call(wake={})
        assert (await engine.call(is_paused={})).is_paused
        await engine.resume()
        await engine.frontend.until_ended(1)
