"""Accounts that want more than there is: limits that they share, and turns."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from triptych_kit.shares import FairQueue, SharedLimit


def test_one_account_alone_has_all_of_a_limit():
    limit = SharedLimit(10)
    limit.take("a", 1, 10)
    assert not limit.has_room("a", 1)
    assert limit.words("a", 1) == ""
    limit.give_back("a")
    assert limit.has_room("a", 1)


def test_an_account_below_its_share_gets_it_although_another_holds_the_limit():
    limit = SharedLimit(12)
    limit.take("full", 1, 12)
    assert limit.share("b", 1) == 6
    limit.take("b", 1, 5)
    assert limit.has_room("b", 1)
    assert not limit.has_room("b", 1, 2)
    limit.take("b", 1)
    assert not limit.has_room("b", 1)
    assert limit.words("b", 1) == " (the account 'b' has 6, its share is 6)"


def test_shares_are_by_weight_and_of_accounts_that_hold_something():
    limit = SharedLimit(12)
    limit.take("a", 1, 12)
    assert (limit.share("b", 3), limit.share("a", 1)) == (9, 12)
    limit.take("b", 3)
    assert (limit.share("b", 3), limit.share("a", 1), limit.share("c", 2)) == (9, 3, 4)
    limit.give_back("a", 12)
    assert limit.share("b", 3) == 12


def test_accounts_together_never_get_more_than_twice_the_limit():
    rng, limit, held = random.Random(5), SharedLimit(20), Counter[str]()
    for _ in range(5000):
        account, amount = rng.choice("abcdefghij"), rng.randrange(1, 8)
        if rng.random() < 0.7 and limit.has_room(account, 1, amount):
            limit.take(account, 1, amount)
            held[account] += amount
        elif held[account]:
            amount = rng.randrange(1, held[account] + 1)
            limit.give_back(account, amount)
            held[account] -= amount
        assert limit.total == held.total() <= 40


def test_items_of_one_account_keep_their_order():
    queue: FairQueue[int] = FairQueue()
    for number in range(5):
        queue.add(number, "a", 1)
        queue.charge("a", 1.0)
    queue.add(-1, "a", 1, first=True)
    assert [queue.take() for _ in range(7)] == [-1, 0, 1, 2, 3, 4, None]


def test_an_account_that_comes_is_next_however_much_another_has_queued():
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add(f"a{number}", "a", 1)
    for number in range(3):
        assert queue.take() == f"a{number}"
        queue.charge("a", 4.0)
    queue.add("b", "b", 1)
    assert queue.take() == "b"
    # It has saved nothing up while it was away.
    queue.charge("b", 4.0)
    for number in range(3, 50):
        assert queue.take() == f"a{number}"
        queue.charge("a", 4.0)
    for _ in range(4):
        queue.add("b", "b", 1)
    taken = ""
    for _ in range(8):
        item = queue.take() or ""
        queue.charge(item[0], 4.0)
        taken += item[0]
    assert taken in ("babababa", "abababab")


def test_accounts_are_served_by_their_weights():
    rng, queue, served = random.Random(3), FairQueue[str](), Counter[str]()
    weights = {"a": 1, "b": 2, "c": 5}
    for account, weight in weights.items():
        for _ in range(3000):
            queue.add(account, account, weight)
    for _ in range(2000):
        account = queue.take() or ""
        cost = rng.choice((0.01, 1.0, 3.0))
        queue.charge(account, cost)
        served[account] += cost
    total = sum(served.values())
    for account, weight in weights.items():
        assert served[account] / total == pytest.approx(weight / 8, abs=0.02)


def test_an_account_that_may_not_be_served_holds_no_other_up():
    queue: FairQueue[str] = FairQueue()
    queue.add("a", "a", 1)
    queue.add("b", "b", 1)
    assert queue.take(lambda account: account != "a") == "b"
    assert queue.take(lambda account: account != "a") is None
    assert queue.take() == "a"


def test_a_removed_item_is_not_served():
    queue: FairQueue[str] = FairQueue()
    for item in ("one", "two"):
        queue.add(item, "a", 1)
    queue.remove("one", "a")
    assert (len(queue), queue.take(), queue.take()) == (1, "two", None)


def test_usage_of_accounts_that_are_gone_is_forgotten_where_there_are_many():
    queue: FairQueue[str] = FairQueue()
    for account in ("old", *map(str, range(2000))):
        queue.add(account, account, 1)
        assert queue.take() == account
        queue.charge(account, 100.0)
    queue.add("old", "old", 1)
    queue.add("new", "new", 1)
    assert queue.take() == "old"
