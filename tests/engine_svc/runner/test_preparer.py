"""Extras are prepared beside the steps, in order; what hangs is left behind, what is dropped is forgotten."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest

from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra, Extras
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.feature import RunnerFeature
from engine_svc.runner.preparer import MAX_ABANDONED, Preparer
from tests.engine_svc.fakes import LIMIT_S
from triptych_kit.shares import SLOW_S


@dataclass(frozen=True)
class Order(Extra):
    """What is to be prepared. held: until the feature's gate opens. is_slow: as the feature says.

    is_long: for longer than preparations of accounts that are not slow.  at_hand: it is prepared at once.
    """

    text: str
    held: bool = False
    is_slow: bool = False
    is_long: bool = False
    at_hand: bool = False
    blocker: str = "order"


@dataclass(frozen=True)
class OtherOrder(Extra):
    blocker: str = "other"


class Dish(str):
    """A text that may have weak references."""


class Kitchen(RunnerFeature):
    prepares = Order

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[int] = []
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.released: SimpleQueue[str] = SimpleQueue()

    def is_slow_to_prepare(self, extra: Order) -> bool:
        return extra.is_slow

    def prepare_at_once(self, extra: Order) -> str | None:
        return Dish(extra.text.upper()) if extra.at_hand else None

    def release(self, prepared: str) -> None:
        self.released.put(prepared)

    def prepare(self, extra: Order) -> str:
        self.threads.append(threading.get_ident())
        self.begun.put(extra.text)
        if extra.held:
            assert self.gate.wait(LIMIT_S)
        if extra.is_long:
            self.gate.wait(2 * SLOW_S)
        if extra.text == "bad":
            raise RequestFailed("INVALID_ARGUMENT", "the text is bad")
        if extra.text == "broken":
            raise KeyError("oven")
        return Dish(extra.text.upper())


class Rig:
    def __init__(self) -> None:
        self.feature = Kitchen()
        self.answers: SimpleQueue[tuple[int, RequestFailed | None]] = SimpleQueue()
        self.preparer = Preparer(
            [RunnerFeature(), self.feature], lambda number, failure: self.answers.put((number, failure))
        )

    def prepare(self, number: int, extra: Any, account: str = "a") -> None:
        self.preparer.prepare(number, f"r{number}", {type(extra): extra}, account, 1)

    def answer(self) -> tuple[int, str]:
        number, failure = self.answers.get(timeout=LIMIT_S)
        return number, "" if failure is None else f"{failure.code}: {failure.message}"

    def extras_of(self, number: int) -> Extras:
        admitted = AdmittedRequest(
            f"r{number}", [1], 1, SamplingParams(max_tokens=1), [[]], {Order: Order("raw"), Extra: "else"}
        )
        return self.preparer.with_prepared(admitted).extras


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.feature.gate.set()
    made.preparer.stop_preparing()


def test_results_stand_in_the_place_of_extras_until_the_request_is_dropped(rig: Rig):
    rig.prepare(1, Order("a"))
    rig.prepare(2, Order("b"))
    assert [rig.answer(), rig.answer()] == [(1, ""), (2, "")]
    assert rig.extras_of(1) == {Order: "A", Extra: "else"}
    assert rig.extras_of(2)[Order] == "B"
    # Again: a request enters once more after a preemption.
    assert rig.extras_of(1)[Order] == "A"
    rig.preparer.drop_prepared("r1")
    assert rig.extras_of(1)[Order] == Order("raw")
    rig.preparer.drop_prepared("unknown")


def test_no_call_of_a_feature_is_in_the_callers_thread(rig: Rig):
    rig.prepare(1, Order("a"))
    rig.prepare(2, Order("b"))
    rig.answer(), rig.answer()
    (thread,) = set(rig.feature.threads)
    assert thread != threading.get_ident()


def test_what_is_at_hand_waits_for_no_thread_and_is_released_once(rig: Rig):
    rig.prepare(1, Order("first", held=True))
    rig.prepare(2, Order("b", at_hand=True))
    assert rig.answers.get_nowait() == (2, None)
    assert rig.extras_of(2) == {Order: "B", Extra: "else"}
    rig.preparer.drop_prepared("r2")
    rig.preparer.drop_prepared("r2")
    assert rig.feature.released.get_nowait() == "B"
    assert rig.feature.released.empty() and rig.extras_of(2)[Order] == Order("raw")
    # One of several extras alone is no answer.
    rig.preparer.prepare(3, "r3", {Order: Order("c", at_hand=True), OtherOrder: OtherOrder()}, "a", 1)
    assert rig.answers.empty()
    rig.feature.gate.set()
    assert [rig.answer()[0], rig.answer()[0]] == [1, 3]


def test_quick_ones_do_not_wait_for_slow_ones(rig: Rig):
    rig.prepare(1, Order("first", held=True, is_slow=True))
    rig.prepare(2, Order("second", is_slow=True))
    rig.prepare(3, Order("quick"))
    assert rig.answer() == (3, "")
    rig.feature.gate.set()
    assert [rig.answer(), rig.answer()] == [(1, ""), (2, "")]


def test_failures_are_answered_with_their_status_and_others_go_on(rig: Rig):
    for number, extra in enumerate((Order("bad"), Order("broken"), OtherOrder(), Order("good"))):
        rig.prepare(number, extra)
    assert [rig.answer() for _ in range(4)] == [
        (0, "INVALID_ARGUMENT: the text is bad"),
        (1, "INTERNAL: Kitchen failed: KeyError: 'oven'"),
        (2, "INTERNAL: no feature of this rank prepares OtherOrder"),
        (3, ""),
    ]


def test_one_that_is_dropped_before_its_turn_is_never_begun(rig: Rig):
    rig.prepare(1, Order("first", held=True))
    assert rig.feature.begun.get(timeout=LIMIT_S) == "first"
    rig.prepare(2, Order("second"))
    rig.prepare(3, Order("third"))
    rig.preparer.drop_prepared("r2")
    rig.feature.gate.set()
    assert [rig.answer(), rig.answer()] == [(1, ""), (3, "")]
    assert rig.feature.begun.get(timeout=LIMIT_S) == "third"


def test_nothing_is_kept_of_one_that_is_dropped_before_its_turn(rig: Rig):
    rig.prepare(1, Order("a", held=True))
    assert rig.feature.begun.get(timeout=LIMIT_S) == "a"
    order = Order("b")
    kept = weakref.ref(order)
    rig.prepare(2, order)
    del order
    rig.preparer.drop_prepared("r2")
    assert kept() is None


def test_nothing_is_kept_of_one_that_was_prepared_when_its_request_ends(rig: Rig):
    rig.prepare(1, Order("a"))
    assert rig.answer() == (1, "")
    rig.preparer.drop_prepared("r1")
    kept = weakref.ref(rig.feature.released.get(timeout=LIMIT_S))
    assert kept() is None


def test_one_that_hangs_is_left_behind_when_it_is_dropped(rig: Rig):
    for number in range(MAX_ABANDONED):
        rig.prepare(number, Order(f"{number}", held=True))
        assert rig.feature.begun.get(timeout=LIMIT_S) == f"{number}"
        rig.preparer.drop_prepared(f"r{number}")
    rig.prepare(8, Order("next"))
    assert rig.answer() == (8, "")
    # So many at once and no more: then the present one has to return.
    rig.prepare(9, Order("last", held=True))
    assert [rig.feature.begun.get(timeout=LIMIT_S) for _ in range(2)] == ["next", "last"]
    rig.preparer.drop_prepared("r9")
    rig.prepare(10, Order("behind"))
    assert rig.answers.empty()
    rig.feature.gate.set()
    # Nothing comes of those that were dropped.
    assert rig.answer() == (10, "")
    assert rig.extras_of(0)[Order] == Order("raw")


def test_accounts_prepare_in_turns(rig: Rig):
    rig.prepare(0, Order("first", held=True, is_slow=True), "a")
    assert rig.feature.begun.get(timeout=LIMIT_S) == "first"
    for number in range(1, 5):
        rig.prepare(number, Order(f"a{number}", is_slow=True), "a")
    rig.prepare(5, Order("b", is_slow=True), "b")
    rig.feature.gate.set()
    for _ in range(6):
        rig.answer()
    begun = [rig.feature.begun.get(timeout=LIMIT_S) for _ in range(5)]
    assert begun.index("b") <= 1


def test_an_account_with_a_long_one_leaves_the_quick_thread_to_others(rig: Rig):
    rig.prepare(0, Order("b"), "b")
    assert rig.answer() == (0, "")
    # Longer than quick ones take.
    rig.prepare(1, Order("long", is_long=True), "a")
    assert rig.answer() == (1, "")
    for number in range(2, 6):
        rig.prepare(number, Order("held", held=True), "a")
    rig.prepare(6, Order("b"), "b")
    assert rig.answer() == (6, "")
    rig.feature.gate.set()
    assert [rig.answer()[0] for _ in range(4)] == [2, 3, 4, 5]


def test_one_that_may_take_long_does_not_wait_for_those_of_a_slow_account(rig: Rig):
    rig.prepare(0, Order("long", is_slow=True, is_long=True), "a")
    assert rig.answer() == (0, "")
    rig.prepare(1, Order("held", is_slow=True, held=True), "a")
    while rig.feature.begun.get(timeout=LIMIT_S) != "held":
        pass
    rig.prepare(2, Order("b", is_slow=True), "b")
    assert rig.answer() == (2, "")
    rig.feature.gate.set()
    assert rig.answer() == (1, "")


def test_what_was_prepared_is_released_once_when_its_request_ends(rig: Rig):
    rig.prepare(1, Order("a"))
    assert rig.answer() == (1, "")
    assert rig.feature.released.empty()
    rig.preparer.drop_prepared("r1")
    assert rig.feature.released.get(timeout=LIMIT_S) == "A"
    # One that is being prepared, when that is done; one that waits for its turn has nothing to release.
    rig.prepare(2, Order("b", held=True))
    rig.prepare(3, Order("c", held=True))
    assert [rig.feature.begun.get(timeout=LIMIT_S) for _ in range(2)] == ["a", "b"]
    rig.preparer.drop_prepared("r3")
    rig.preparer.drop_prepared("r2")
    rig.feature.gate.set()
    assert rig.feature.released.get(timeout=LIMIT_S) == "B"
    rig.preparer.drop_prepared("r2")
    rig.prepare(4, Order("d"))
    assert rig.answer() == (4, "")
    assert rig.feature.released.empty()
