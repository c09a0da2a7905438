"""Ranks that start each other's waves through a store, where there is no coordinator."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from engine_svc.data_parallel.driver import RankStatus
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.wake_signal import SIGNAL_AFTER_S, WakeSignal, connect_signal_store
from engine_svc.data_parallel.wave import LockstepState
from triptych_kit.clock import FakeClock

MEETING = Meeting(3, 0, 2, "127.0.0.1", 7000)
WAITING = RankStatus(LockstepState.PAUSED, wave=5, generation=3)
ASKING = RankStatus(LockstepState.RUNNING, wave=5, asks=True, generation=3)
PATIENCE_S = 10.0


class FakeSignalStore:
    """Words in memory; `broken` makes the store unreachable for so many looks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.signaled: list[int] = []
        self.num_looks = 0
        self.broken = 0

    def signal(self, wave: int) -> None:
        with self.changed:
            self.signaled.append(wave)
            self.changed.notify_all()

    def is_signaled(self, wave: int) -> bool:
        with self.changed:
            self.num_looks += 1
            self.changed.notify_all()
            if self.broken:
                self.broken -= 1
                raise RuntimeError("out of reach")
            return wave in self.signaled

    def until(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)


class Rig:
    """One rank's wake signal; `received` gets its waves."""

    def __init__(self, signal_store: FakeSignalStore, *, has_coordinator: bool = False) -> None:
        self.clock = FakeClock()
        self.signal_store = signal_store
        self.received: list[int] = []
        self.has_coordinator = has_coordinator
        self.wake_signal = WakeSignal(
            connect=lambda meeting: signal_store,
            on_signal=self._on_signal,
            has_coordinator=lambda: self.has_coordinator,
            clock=self.clock,
        )

    def __enter__(self) -> Rig:
        self.wake_signal.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.wake_signal.stop()
        assert self.wake_signal.join(PATIENCE_S)

    def _on_signal(self, wave: int) -> None:
        with self.signal_store.changed:
            self.received.append(wave)
            self.signal_store.changed.notify_all()


def test_without_a_coordinator_who_asks_rings_at_once_and_who_waits_hears_it_once():
    signal_store = FakeSignalStore()
    with Rig(signal_store) as asking, Rig(signal_store) as waiting:
        waiting.wake_signal.move(WAITING, MEETING)
        signal_store.until(lambda: signal_store.num_looks > 1)
        assert waiting.received == []
        asking.wake_signal.move(ASKING, MEETING)
        signal_store.until(lambda: waiting.received == [5])
        asking.wake_signal.move(ASKING, MEETING)
        waiting.wake_signal.move(WAITING, MEETING)
        assert (signal_store.signaled, waiting.received) == ([5], [5])


def test_with_a_coordinator_the_bell_waits_for_what_it_does():
    signal_store = FakeSignalStore()
    with Rig(signal_store, has_coordinator=True) as asking:
        asking.wake_signal.move(ASKING, MEETING)
        asking.wake_signal.move(WAITING, MEETING)
        signal_store.until(lambda: signal_store.num_looks > 0)
        assert signal_store.signaled == []
        asking.wake_signal.move(ASKING, MEETING)
        asking.clock.advance(SIGNAL_AFTER_S)
        signal_store.until(lambda: signal_store.signaled == [5])


def test_who_is_in_no_group_or_in_a_wave_does_not_listen():
    signal_store = FakeSignalStore()
    with Rig(signal_store) as rank:
        for rank_status, meeting in (
            (RankStatus(), None),
            (RankStatus(LockstepState.PAUSED, generation=2), MEETING),
            (RankStatus(LockstepState.RUNNING, generation=3), MEETING),
            (RankStatus(LockstepState.QUIET, generation=3), MEETING),
        ):
            rank.wake_signal.move(rank_status, meeting)
    assert signal_store.num_looks == 0


def test_words_reach_other_ranks_through_the_store_of_rank_0():
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False
    )
    meeting = Meeting(3, 0, 2, "127.0.0.1", store.port)
    one, other = connect_signal_store(meeting, 5.0), connect_signal_store(meeting, 5.0)
    assert not other.is_signaled(5)
    one.signal(5)
    # The store answers nothing to a word; on one connection what is asked next comes after it.
    assert one.is_signaled(5)
    assert other.is_signaled(5)
    assert not other.is_signaled(6)
    assert not connect_signal_store(Meeting(4, 0, 2, "127.0.0.1", store.port), 5.0).is_signaled(5)
    one.signal(12)
    assert one.is_signaled(12)
    assert other.is_signaled(12)
    assert not other.is_signaled(5)
    assert len([key for key in store.list_keys() if "wake-signal" in key]) == 1


def test_who_stood_still_meanwhile_hears_a_bell_again():
    signal_store = FakeSignalStore()
    signal_store.signal(5)
    with Rig(signal_store) as rank:
        for num_received in (1, 2):
            rank.wake_signal.move(WAITING, MEETING)
            signal_store.until(lambda num_received=num_received: rank.received == [5] * num_received)
            rank.wake_signal.move(RankStatus(LockstepState.QUIET, wave=5, generation=3), MEETING)


def test_a_store_that_is_gone_is_looked_for_again():
    signal_store = FakeSignalStore()
    calls: list[Meeting] = []

    def connect(meeting: Meeting) -> FakeSignalStore:
        with signal_store.changed:
            calls.append(meeting)
            signal_store.changed.notify_all()
        raise ConnectionRefusedError("gone")

    wake_signal = WakeSignal(
        connect=connect, on_signal=lambda wave: None, has_coordinator=lambda: False, clock=FakeClock()
    )
    wake_signal.start()
    for num_calls in (1, 2):
        wake_signal.move(RankStatus(LockstepState.PAUSED, wave=num_calls, generation=3), MEETING)
        signal_store.until(lambda num_calls=num_calls: len(calls) >= num_calls)
    wake_signal.stop()
    assert wake_signal.join(PATIENCE_S)
