"""Who still needs the blocks of a request that ended takes hold of them; others are free at once (66)."""

from __future__ import annotations

import pytest

from tests.engine_svc.cache.doubles import Sender
from tests.engine_svc.scheduler.fakes import EOS, Stage, request


def _stage(sender: Sender | None) -> Stage:
    stage = Stage(num_blocks=11, async_scheduling=True, hooks=[sender] if sender else [])
    if sender is not None:
        sender.kv_cache = stage.cache
    return stage


@pytest.mark.parametrize("has_sender", [True, False])
def test_66_blocks_are_kept_until_the_step_in_flight_has_come_back(has_sender: bool):
    stage = _stage(Sender() if has_sender else None)
    stage.add(request("a", 40))
    first, second = stage.schedule(), stage.schedule()
    assert second.request_ids == ["a"]
    [output] = stage.update(first, {"a": [EOS]})
    assert output.finish_reason is not None
    # The second step may still write to them, so nobody else is to have them where they are sent.
    assert stage.cache.num_free_blocks == (7 if has_sender else 10)
    assert not stage.scheduler.has_work
    assert stage.update(second) == []
    assert stage.cache.num_free_blocks == 10


def test_66_without_a_step_in_flight_the_next_update_lets_go():
    sender = Sender()
    stage = _stage(sender)
    stage.add(request("a", 40), request("b", 40))
    stage.update(stage.schedule(), {"a": [EOS]})
    # Hooks hear of the end before they hear of the update.
    assert sender.held == []
    assert stage.cache.num_free_blocks == 7
    assert stage.scheduler.running_ids == ["b"]


def test_66_kept_blocks_are_nobody_elses_and_come_back_in_their_order():
    sender = Sender()
    stage = _stage(sender)
    stage.add(request("a", 40))
    first, second = stage.schedule(), stage.schedule()
    stage.update(first, {"a": [EOS]})
    assert sender.held == [(second.step_number, [3, 2, 1])]
    # 8 blocks are wanted, 7 are free.
    stage.add(request("b", 113))
    third = stage.schedule()
    assert third.request_ids == []
    stage.update(second)
    assert stage.schedule().request_ids == ["b"]
    assert stage.pool.ref_count(3) == 1


def test_66_an_abort_keeps_them_too():
    sender = Sender()
    stage = _stage(sender)
    stage.add(request("a", 40))
    plan = stage.schedule()
    stage.scheduler.abort(["a"], stage.now)
    assert stage.cache.num_free_blocks == 7
    stage.update(plan)
    assert stage.cache.num_free_blocks == 10
