"""What the cache reports to its observers, and that they know what can be found (54)."""

from __future__ import annotations

import pytest

from engine_svc.cache.attention import FullAttention, SlidingWindow
from engine_svc.cache.block_pool import BlockPool, content_key
from engine_svc.cache.observer import StoredBlocks
from engine_svc.cache.prefix import PrefixHit
from tests.engine_svc.cache.doubles import EventLog
from tests.engine_svc.cache.fakes import SmallCache, request, tables_of, tokens


def _stores(log: EventLog) -> list[StoredBlocks]:
    return [part for event in log.take() for part in event if isinstance(part, StoredBlocks)]


def test_54_caching_three_blocks_is_one_event_with_three_hashes_and_48_tokens():
    log = EventLog()
    small = SmallCache(11, observers=(log,))
    first = small.admitted(request("a", tokens(55)))
    root = small.cache.hasher.root()
    stored = StoredBlocks(first.block_hashes, root, tokens(48), 16, 0)
    assert log.take() == [("allocate", [1, 2, 3, 4]), ("store", stored)]


def test_54_stored_blocks_name_the_variant_that_has_computed_them():
    log = EventLog()
    small = SmallCache(11, observers=(log,))
    first = request("a", tokens(16))
    first.variant = "cook"
    small.admitted(first)
    assert [stored.variant for stored in _stores(log)] == ["cook"]


def test_54_caching_other_content_in_their_place_is_three_removed_and_one_stored():
    log = EventLog()
    small = SmallCache(4, observers=(log,))
    first, second = request("a", tokens(48)), request("b", tokens(48, 500))
    assert small.admit(first)
    small.cache.release(first)
    log.take()
    assert small.admit(second)
    hashes = first.block_hashes
    assert log.take() == [
        ("evict", 3, hashes[2], 0),
        ("evict", 2, hashes[1], 0),
        ("evict", 1, hashes[0], 0),
        ("allocate", [3, 2, 1]),
        ("store", StoredBlocks(second.block_hashes, small.cache.hasher.root(), tokens(48, 500), 16, 0)),
    ]


def test_54_reset_is_one_event_and_a_refused_one_none():
    log = EventLog()
    small = SmallCache(4, observers=(log,))
    first = small.admitted(request("a", tokens(48)))
    log.take()
    assert not small.cache.reset()
    assert log.take() == []
    small.cache.release(first)
    assert small.cache.reset()
    assert log.take() == [("clear",)]


def test_54_a_hit_tells_which_blocks_are_shared_and_what_is_stored_behind_them():
    log = EventLog()
    small = SmallCache(11, observers=(log,))
    first, second = request("a", tokens(40)), request("b", [*tokens(32), *tokens(20, 500)])
    assert small.admit(first)
    log.take()
    assert small.admit(second)
    stored = StoredBlocks(second.block_hashes[2:], first.block_hashes[1], tokens(16, 500), 16, 0)
    assert log.take() == [("hold", [1, 2]), ("allocate", [4, 5]), ("store", stored)]


def test_54_the_parent_of_later_blocks_is_the_hash_before_and_of_the_first_the_root_of_their_request():
    log = EventLog()
    small = SmallCache(11, block_size=4, observers=(log,), fingerprint=b"model")
    running = small.admitted(request("a", tokens(4), salt="tenant", extra_keys=("adapter",)))
    root = small.cache.hasher.root("tenant", ("adapter",))
    assert _stores(log) == [StoredBlocks(running.block_hashes, root, [0, 1, 2, 3], 4, 0)]
    small.append(running, tokens(3, 4))
    assert _stores(log) == []
    small.append(running, tokens(6, 7))
    hashes = running.block_hashes
    assert _stores(log) == [StoredBlocks(hashes[1:], hashes[0], tokens(8, 4), 4, 0)]


def test_54_every_group_tells_of_its_own_blocks():
    log = EventLog()
    small = SmallCache(30, groups=(FullAttention(8), SlidingWindow(4, 8)), observers=(log,))
    running = small.admitted(request("a", tokens(17)))
    hashes, root = running.block_hashes, small.cache.hasher.root()
    assert _stores(log) == [
        StoredBlocks([hashes[1], hashes[3]], root, tokens(16), 8, 0),
        StoredBlocks(hashes[:4], root, tokens(16), 4, 1),
    ]
    small.append(running, tokens(7, 17))
    assert _stores(log) == [
        StoredBlocks([running.block_hashes[5]], hashes[3], tokens(8, 16), 8, 0),
        StoredBlocks(running.block_hashes[4:6], hashes[3], tokens(8, 16), 4, 1),
    ]
    [full, window] = tables_of(running)
    small.cache.release(running)
    log.take()
    small.evict(full[1])
    assert ("evict", full[1], hashes[3], 0) in log.take()
    small.evict(window[4])
    assert ("evict", window[4], running.block_hashes[4], 1) in log.take()


@pytest.mark.parametrize(("num_reserved", "num_gone"), [(4, 0), (5, 1), (10, 3)])
def test_54_blocks_a_window_passed_before_registration_are_not_reported(num_reserved: int, num_gone: int):
    log = EventLog()
    small = SmallCache(30, groups=(SlidingWindow(2, 4),), observers=(log,))
    loaded = request("a", tokens(14), skips_lookup=True)
    assert small.cache.reserve(loaded, num_reserved) is not None
    assert small.cache.admit(loaded, PrefixHit(), 14 - num_reserved, reserve_all=False) is not None
    hashes = loaded.block_hashes
    parent = hashes[num_gone - 1] if num_gone else small.cache.hasher.root()
    stored = StoredBlocks(hashes[num_gone:], parent, tokens(14)[2 * num_gone :], 2, 0)
    assert _stores(log) == [stored]
    assert small.hashes_of(loaded) == [None] * num_gone + hashes[num_gone:]
    assert loaded.block_tables[0].num_registered == 7
    assert loaded.registers_at == 16


def test_54_a_group_that_stores_nothing_is_not_reported():
    log = EventLog()
    groups = FullAttention(8), SlidingWindow(4, 8)
    small = SmallCache(30, groups=groups, drop_last_matched_block=True, observers=(log,))
    running = small.admitted(request("a", tokens(8)))
    assert [stored.group for stored in _stores(log)] == [0, 1]
    # The block that a hit gives up may be the third of the window; full attention has no second yet.
    small.append(running, tokens(4, 8))
    hashes = running.block_hashes
    assert _stores(log) == [StoredBlocks(hashes[2:], hashes[1], tokens(4, 8), 4, 1)]


def test_54_twins_are_reported_one_by_one():
    log = EventLog()
    pool = BlockPool(3, observers=(log,))
    key = content_key(bytes(32), 2)
    pool.register(pool.allocate(2), [key, key])
    pool.release([2])
    pool.allocate(1)
    pool.release([1])
    pool.allocate(1)
    evictions = [event for event in log.take() if event[0] == "evict"]
    assert evictions == [("evict", 2, bytes(32), 2), ("evict", 1, bytes(32), 2)]


def test_without_prefix_caching_only_blocks_are_reported():
    log = EventLog()
    small = SmallCache(4, enable_prefix_caching=False, observers=(log,))
    for name in ("a", "b"):
        holder = small.admitted(request(name, tokens(48)))
        small.cache.release(holder)
    assert log.take() == [("allocate", [1, 2, 3]), ("allocate", [3, 2, 1])]


def test_every_observer_is_notified_of_everything():
    logs = EventLog(), EventLog()
    small = SmallCache(4, observers=logs)
    for first in (0, 0, 500):
        holder = small.admitted(request(f"from {first}", tokens(48, first)))
        small.cache.release(holder)
    assert small.cache.reset()
    notifications = logs[0].take()
    assert {event[0] for event in notifications} == {"allocate", "hold", "store", "evict", "clear"}
    assert logs[1].take() == notifications
