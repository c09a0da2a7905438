"""Adapters in memory: each is loaded once, and what is used stays."""

from __future__ import annotations

import threading

import pytest

from engine_svc.core.errors import RequestFailed
from engine_svc.features.adapters.extras import AdapterUse, Pins
from engine_svc.features.adapters.store import AdapterStore, LoadedAdapter

NO_PINS = Pins()


def use_of(name: str, pins: Pins = NO_PINS) -> AdapterUse:
    return AdapterUse(name, f"/{name}", name, pins)


@pytest.fixture
def loads() -> list[str]:
    return []


@pytest.fixture
def store(loads) -> AdapterStore:
    def load(use: AdapterUse) -> LoadedAdapter:
        loads.append(use.name)
        if use.name == "broken":
            raise RequestFailed("INVALID_ARGUMENT", "it is broken")
        return LoadedAdapter(use.digest, [])

    return AdapterStore(2, load)


def test_the_one_that_was_not_used_for_longest_gives_way(store, loads):
    for name in ("a", "b", "a", "c", "a"):
        store.give_back(store.lease(use_of(name)))
        assert len(store) <= 2
    assert loads == ["a", "b", "c"]
    store.give_back(store.lease(use_of("b")))
    assert loads == ["a", "b", "c", "b"]
    assert "c" not in store


def test_one_with_a_lease_stays_and_more_leases_than_room_are_refused(store):
    held = [store.lease(use_of("a")), store.lease(use_of("b"))]
    with pytest.raises(RequestFailed, match="2 adapters are in use, --max-cpu-loras is 2"):
        store.lease(use_of("c"))
    store.give_back(held[0])
    store.lease(use_of("c"))
    assert "b" in store and "a" not in store


def test_one_that_is_loaded_is_leased_without_a_load_and_others_are_not(store, loads):
    assert store.lease_loaded(use_of("a")) is None
    first = store.lease(use_of("a"))
    assert store.lease_loaded(use_of("a")) is first and first.num_leases == 2
    store.lease(use_of("b"))
    store.give_back(first)
    with pytest.raises(RequestFailed, match="2 adapters are in use"):
        store.lease(use_of("c"))
    assert loads == ["a", "b"]


def test_a_pinned_one_stays_until_nothing_else_can_give_way(store, loads):
    pins = Pins(1, ("a",))
    store.give_back(store.lease(use_of("a", pins)))
    for name in ("b", "c", "d"):
        store.give_back(store.lease(use_of(name, pins)))
    assert "a" in store
    held = store.lease(use_of("b", pins))
    store.lease(use_of("c", pins))
    assert "a" not in store and held.digest == "b"


def test_one_that_is_pinned_no_longer_gives_way_in_its_turn(store):
    store.give_back(store.lease(use_of("a", Pins(1, ("a",)))))
    store.give_back(store.lease(use_of("b", Pins(2, ()))))
    # Prepared late: it came before the pin ended.
    store.give_back(store.lease(use_of("b", Pins(1, ("a",)))))
    store.give_back(store.lease(use_of("c", Pins(2, ()))))
    assert "a" not in store


def test_those_that_are_kept_elsewhere_count_as_in_memory_until_they_are_let_go(store):
    first = store.lease(use_of("a"))
    store.give_back(first)
    for name in ("b", "c"):
        store.give_back(store.lease(use_of(name)))
    assert (len(store), store.num_in_memory, first.is_dropped) == (2, 3, True)
    del first
    assert (store.num_in_memory, store.peak_in_memory) == (2, 3)


def test_one_with_a_slot_gives_way_after_others(store):
    with_slot = store.lease(use_of("a"))
    with_slot.has_slot = True
    for held in (with_slot, store.lease(use_of("b"))):
        store.give_back(held)
    store.lease(use_of("c"))
    assert "a" in store and "b" not in store


def test_others_are_leased_and_given_back_while_one_is_loaded():
    begun, may_end = threading.Event(), threading.Event()

    def load(use: AdapterUse) -> LoadedAdapter:
        if use.name == "slow":
            begun.set()
            may_end.wait(30)
        return LoadedAdapter(use.digest, [])

    store = AdapterStore(2, load)
    held = store.lease(use_of("a"))
    loading = threading.Thread(target=store.lease, args=(use_of("slow"),))
    loading.start()
    assert begun.wait(30)
    store.give_back(held)
    assert store.lease(use_of("a")) is held and loading.is_alive()
    may_end.set()
    loading.join()
    assert len(store) == 2


def test_one_that_cannot_be_loaded_takes_no_room(store):
    store.give_back(store.lease(use_of("a")))
    with pytest.raises(RequestFailed, match="it is broken"):
        store.lease(use_of("broken"))
    assert len(store) == 1
