"""Memory of the KV cache that is there before its blocks are used."""

from __future__ import annotations

import os
import threading
import weakref

import pytest
import torch

from engine_svc.runner.memory import prefault
from engine_svc.runner.memory.parked_memory import ParkedMemory
from engine_svc.runner.memory.prefault import Prefault, run_beside
from tests.resident import resident_mib
from triptych_kernels import cpu

pytestmark = pytest.mark.skipif(cpu.native_ops() is None, reason="needs the compiled kernels")

# Four layers of 64 MiB, of blocks of 2 KiB each: 1,024 of them fill a large page.
_NUM_BLOCKS = 1 << 15
_BLOCK_MIB = 4 * 2 / 1024


class Rig:
    """A cache, whose calls for elsewhere are made at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.stacks = [torch.empty(2, _NUM_BLOCKS, 1, 16, 64, dtype=torch.bfloat16) for _ in range(2)]
        self.calls = 0
        self.prefault = Prefault(self.stacks, self.call, at_once=at_once)

    def call(self, call):
        self.calls += 1
        call()

    def grows_by(self, block_id: int) -> float:
        before = resident_mib()
        self.prefault.reach(block_id)
        return resident_mib() - before


def test_memory_is_there_before_blocks_are_used_and_not_long_before():
    rig = Rig()
    before = resident_mib()
    rig.prefault.restart()
    assert resident_mib() - before == pytest.approx(64 * _BLOCK_MIB, abs=0.3)
    assert rig.grows_by(31) < 0.3
    assert rig.grows_by(32) == pytest.approx(64 * _BLOCK_MIB, abs=0.3)
    # A long prompt: what it uses, and as much again.
    assert rig.grows_by(700) == pytest.approx((1024 - 128) * _BLOCK_MIB, abs=2)
    before = resident_mib()
    for stack in rig.stacks:
        stack[:, :1024] = 1
    assert resident_mib() - before < 3  # of 8, with what threads take that fill
    # From here on a large page of each layer.
    assert rig.grows_by(1024 + 511) == pytest.approx(1024 * _BLOCK_MIB, abs=9)
    assert rig.grows_by(1024 + 511) < 0.3


def test_all_memory_of_a_cache_of_a_stated_size_is_got_at_once_the_first_blocks_first(monkeypatch):
    starts = []

    def note(address, num_bytes, real=prefault.populate):
        starts.append(address)
        return real(address, num_bytes)

    monkeypatch.setattr(prefault, "populate", note)
    rig = Rig(at_once=True)
    before = resident_mib()
    rig.prefault.restart()
    assert resident_mib() - before == pytest.approx(_NUM_BLOCKS * _BLOCK_MIB, abs=2)
    layers = [layer.data_ptr() for stack in rig.stacks for layer in stack]
    # One block of each layer to try, then the blocks of all layers before more of any.
    assert starts[:8] == layers * 2
    assert starts[8:12] == [layer + 64 * 2048 for layer in layers]
    assert rig.calls == 1
    rig.prefault.reach(_NUM_BLOCKS - 1)
    assert rig.calls == 1


def test_a_cache_that_is_let_go_of_is_not_kept_until_it_has_all_its_memory():
    rig, calls = Rig(at_once=True), []
    rig.prefault = prefault.Prefault(rig.stacks, calls.append, at_once=True)
    rig.prefault.restart()
    (call,) = calls
    stack = weakref.ref(rig.stacks[0])
    before = resident_mib()
    del rig
    assert stack() is None
    call()
    assert resident_mib() - before < 1


def test_what_is_stored_stays():
    rig = Rig()
    for stack in rig.stacks:
        stack[:, :200] = 7
        stack[:, -1] = 7
    rig.prefault.restart()
    rig.prefault.reach(_NUM_BLOCKS - 1)
    for stack in rig.stacks:
        assert (stack[:, :200] == 7).all()
        assert (stack[:, -1] == 7).all()


def test_nothing_is_asked_for_twice_or_beyond_the_end():
    rig = Rig()
    rig.prefault.restart()
    rig.prefault.reach(_NUM_BLOCKS - 1)
    assert rig.calls == 2
    rig.prefault.reach(_NUM_BLOCKS - 1)
    assert rig.calls == 2


def test_a_cache_that_sleeps_has_nothing_to_get_and_begins_anew_when_it_wakes():
    rig = Rig()
    rig.prefault.restart()
    parked = ParkedMemory(rig.stacks, keep=False)
    assert rig.grows_by(5000) < 0.3
    parked.restore()
    before = resident_mib()
    rig.prefault.restart()
    assert resident_mib() - before == pytest.approx(64 * _BLOCK_MIB, abs=0.3)


def test_a_system_that_cannot_gets_no_calls_and_steps_store_as_ever(monkeypatch):
    monkeypatch.setattr("engine_svc.runner.memory.prefault.populate", lambda address, num_bytes: False)
    rig = Rig()
    rig.prefault.restart()
    rig.prefault.reach(_NUM_BLOCKS - 1)
    assert rig.calls == 0
    rig.stacks[0][:, :, -1] = 7
    assert (rig.stacks[0][:, :, -1] == 7).all()


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs several cores and a system that holds threads to one",
)
def test_memory_is_got_on_any_core_while_the_thread_of_the_steps_is_held_to_one():
    seen, is_over = [], threading.Event()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        is_over.set()

    def steps() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        run_beside(look)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert is_over.wait(30)
    assert seen == [os.sched_getaffinity(os.getpid())]
