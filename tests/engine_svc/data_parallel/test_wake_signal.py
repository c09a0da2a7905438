"""Ranks that tell each other of a wave through a store, where no coordinator does."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from engine_svc.data_parallel.driver import Standing
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.wake_signal import RING_AFTER_S, Doorbell, reach_bell
from engine_svc.data_parallel.wave import LockstepState
from service_kit.clock import FakeClock

MEETING = Meeting(3, 0, 2, "127.0.0.1", 7000)
WAITING = Standing(LockstepState.PAUSED, wave=5, generation=3)
ASKING = Standing(LockstepState.RUNNING, wave=5, asks=True, generation=3)
PATIENCE_S = 10.0


class FakeBell:
    """Words in memory; `broken` makes the store unreachable for so many looks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.rung: list[int] = []
        self.num_looks = 0
        self.broken = 0

    def ring(self, wave: int) -> None:
        with self.changed:
            self.rung.append(wave)
            self.changed.notify_all()

    def is_rung(self, wave: int) -> bool:
        with self.changed:
            self.num_looks += 1
            self.changed.notify_all()
            if self.broken:
                self.broken -= 1
                raise RuntimeError("out of reach")
            return wave in self.rung

    def until(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)


class Rig:
    """One rank's doorbell; `heard` gets the waves it is told of."""

    def __init__(self, bell: FakeBell, *, has_coordinator: bool = False) -> None:
        self.clock = FakeClock()
        self.bell = bell
        self.heard: list[int] = []
        self.has_coordinator = has_coordinator
        self.doorbell = Doorbell(
            connect=lambda meeting: bell,
            on_ring=self._on_ring,
            has_coordinator=lambda: self.has_coordinator,
            clock=self.clock,
        )

    def __enter__(self) -> Rig:
        self.doorbell.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.doorbell.stop()
        assert self.doorbell.join(PATIENCE_S)

    def _on_ring(self, wave: int) -> None:
        with self.bell.changed:
            self.heard.append(wave)
            self.bell.changed.notify_all()


def test_without_a_coordinator_who_asks_rings_at_once_and_who_waits_hears_it_once():
    bell = FakeBell()
    with Rig(bell) as asking, Rig(bell) as waiting:
        waiting.doorbell.move(WAITING, MEETING)
        bell.until(lambda: bell.num_looks > 1)
        assert waiting.heard == []
        asking.doorbell.move(ASKING, MEETING)
        bell.until(lambda: waiting.heard == [5])
        asking.doorbell.move(ASKING, MEETING)
        waiting.doorbell.move(WAITING, MEETING)
        assert (bell.rung, waiting.heard) == ([5], [5])


def test_with_a_coordinator_the_bell_waits_for_what_it_does():
    bell = FakeBell()
    with Rig(bell, has_coordinator=True) as asking:
        asking.doorbell.move(ASKING, MEETING)
        asking.doorbell.move(WAITING, MEETING)
        bell.until(lambda: bell.num_looks > 0)
        assert bell.rung == []
        asking.doorbell.move(ASKING, MEETING)
        asking.clock.advance(RING_AFTER_S)
        bell.until(lambda: bell.rung == [5])


def test_who_is_in_no_group_or_in_a_wave_does_not_listen():
    bell = FakeBell()
    with Rig(bell) as rank:
        for standing, meeting in (
            (Standing(), None),
            (Standing(LockstepState.PAUSED, generation=2), MEETING),
            (Standing(LockstepState.RUNNING, generation=3), MEETING),
            (Standing(LockstepState.QUIET, generation=3), MEETING),
        ):
            rank.doorbell.move(standing, meeting)
    assert bell.num_looks == 0


def test_words_reach_other_ranks_through_the_store_of_rank_0():
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False
    )
    meeting = Meeting(3, 0, 2, "127.0.0.1", store.port)
    one, other = reach_bell(meeting, 5.0), reach_bell(meeting, 5.0)
    assert not other.is_rung(5)
    one.ring(5)
    assert other.is_rung(5)
    assert not other.is_rung(6)
    assert not reach_bell(Meeting(4, 0, 2, "127.0.0.1", store.port), 5.0).is_rung(5)
    one.ring(12)
    assert other.is_rung(12)
    assert not other.is_rung(5)
    assert len([key for key in store.list_keys() if "doorbell" in key]) == 1


def test_who_stood_still_meanwhile_hears_a_bell_again():
    bell = FakeBell()
    bell.ring(5)
    with Rig(bell) as rank:
        for num_heard in (1, 2):
            rank.doorbell.move(WAITING, MEETING)
            bell.until(lambda num_heard=num_heard: rank.heard == [5] * num_heard)
            rank.doorbell.move(Standing(LockstepState.QUIET, wave=5, generation=3), MEETING)


def test_a_store_that_is_gone_is_looked_for_again():
    bell = FakeBell()
    calls: list[Meeting] = []

    def connect(meeting: Meeting) -> FakeBell:
        with bell.changed:
            calls.append(meeting)
            bell.changed.notify_all()
        raise ConnectionRefusedError("gone")

    doorbell = Doorbell(
        connect=connect, on_ring=lambda wave: None, has_coordinator=lambda: False, clock=FakeClock()
    )
    doorbell.start()
    for num_calls in (1, 2):
        doorbell.move(Standing(LockstepState.PAUSED, wave=num_calls, generation=3), MEETING)
        bell.until(lambda num_calls=num_calls: len(calls) >= num_calls)
    doorbell.stop()
    assert doorbell.join(PATIENCE_S)
