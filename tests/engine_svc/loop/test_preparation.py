"""Requests with something to prepare: blocked in their position, admitted when all ranks are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from engine_svc.core.errors import DeviceLost, RequestFailed
from engine_svc.core.extras import Extra, Extras, UnknownExtra
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Abort, Add, Call, Inbox, Prepared, StatsSnapshot
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import NoLockstep
from engine_svc.scheduler.config import PauseState
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.fakes import FakeExecutor, make_scheduler
from tests.engine_svc.loop.frontend import Frontend
from triptych_kit.clock import FakeClock

LIMIT_S = 10.0


@dataclass(frozen=True)
class Order(Extra):
    text: str
    blocker: str = "order"


@dataclass(frozen=True)
class LateOrder(Order):
    is_slow_at_first = True


class ScriptedRanks:
    """Two ranks; what they are sent is noted, and they answer when the test says so."""

    num_preparing = 2

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, Extras]] = []
        self.dropped: list[str] = []
        self.is_stopped = False

    def prepare(self, number: int, request_id: str, extras: Extras, account: str, weight: int) -> None:
        if extras.get(Order, Order("")).text == "lost":
            raise DeviceLost("rank 1 ended")
        if extras.get(Order, Order("")).text == "unknown":
            raise UnknownExtra("no rank can read it")
        self.sent.append((number, request_id, extras))

    def drop_prepared(self, request_id: str) -> None:
        self.dropped.append(request_id)

    def stop_preparing(self) -> None:
        self.is_stopped = True


class Rig:
    """An engine of which the test runs each turn."""

    def __init__(self, *, max_num_seqs: int = 8, max_preparations: int = 100, depth: int = 1) -> None:
        self.clock, self.ranks = FakeClock(), ScriptedRanks()
        self.preparations = Preparations(
            self.ranks, self.clock, max_preparations=max_preparations, limit_s=LIMIT_S
        )
        self.plans: list[StepPlan] = []
        self.scheduler = make_scheduler(
            max_num_seqs=max_num_seqs, max_steps_in_flight=depth, features=[self.preparations]
        )
        self.inbox, self.frontend = Inbox(100), Frontend()
        self.engine = Engine(
            scheduler=self.scheduler,
            executor=FakeExecutor(self.plans.append),
            inbox=self.inbox,
            stats_snapshot=StatsSnapshot(),
            clock=self.clock,
            lockstep=NoLockstep(),
            preparations=self.preparations,
            max_in_flight=depth,
            at_end=[self.preparations.close],
        )

    def add(
        self,
        handle: int,
        text: str = "",
        *,
        kind: type[Order] = Order,
        max_tokens: int = 3,
        deadline_at: float | None = None,
        account: str = "",
    ) -> None:
        extras: Extras = {kind: kind(text)} if text else {}
        request = Request(
            f"r{handle}",
            [1, 2, 3, handle],
            4,
            SamplingParams(max_tokens=max_tokens),
            arrival_at=handle,
            extras=extras,
            account=account,
        )
        self.inbox.put(Add(request, self.frontend.outbox, handle, deadline_at))

    def answer(self, handle: int, *failures: RequestFailed | None) -> None:
        (number,) = [number for number, request_id, _ in self.ranks.sent if request_id == f"r{handle}"]
        for failure in failures:
            self.inbox.put(Prepared(number, failure))

    def turn(self, num_turns: int = 1) -> None:
        for _ in range(num_turns):
            self.engine.turn()
            self.frontend.read_all()

    @property
    def ends(self) -> dict[int, tuple[FinishReason, int | None, str, str]]:
        return {
            handle: (end.reason, end.stop_token_id, end.code, end.message)
            for handle, end in self.frontend.end_of.items()
        }

    def admitted(self) -> Sequence[str]:
        return [entry.request_id for plan in self.plans for entry in plan.admitted]


FAILURE = RequestFailed("INVALID_ARGUMENT", "no such thing")
BUSY = RequestFailed("RESOURCE_EXHAUSTED", "2 requests wait for order, the limit is 2")
LATE = RequestFailed("DEADLINE_EXCEEDED", "preparing order took longer than 10 s")


def ended_by(failure: RequestFailed) -> tuple[FinishReason, None, str, str]:
    return FinishReason.ERROR, None, failure.code, failure.message


def test_the_first_that_succeeds_may_take_longer():
    rig = Rig()
    rig.add(1, "text", kind=LateOrder)
    rig.turn()
    rig.clock.advance(6 * LIMIT_S)
    rig.turn()
    assert rig.ends == {}
    rig.answer(1, None, None)
    rig.turn(4)
    rig.add(2, "text", kind=LateOrder)
    rig.turn()
    rig.clock.advance(LIMIT_S)
    rig.turn()
    assert rig.ends[2] == ended_by(LATE)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_runs_once_every_rank_has_prepared_it_and_delays_none(depth):
    rig = Rig(depth=depth)
    rig.add(1, "text")
    rig.add(2)
    rig.turn()
    assert (rig.scheduler.waiting_ids, rig.admitted()) == (["r1"], ["r2"])
    rig.answer(1, None)
    rig.turn(2)
    assert rig.admitted() == ["r2"]
    rig.answer(1, None)
    rig.add(3)
    rig.turn(8)
    assert rig.admitted() == ["r2", "r1", "r3"]
    assert [end[0] for end in rig.ends.values()] == [FinishReason.LENGTH] * 3
    # What it was given is that part of its extras, and is forgotten when it has ended.
    assert rig.ranks.sent == [(1, "r1", {Order: Order("text")})]
    assert rig.ranks.dropped == ["r1"]


def test_a_request_keeps_its_position_in_the_order():
    rig = Rig(max_num_seqs=1)
    rig.add(1, "text")
    rig.add(2)
    rig.add(3)
    rig.turn()
    assert (rig.scheduler.running_ids, rig.scheduler.waiting_ids) == (["r2"], ["r1", "r3"])
    rig.answer(1, None, None)
    rig.turn(12)
    assert rig.admitted() == ["r2", "r1", "r3"]


def test_the_first_failure_ends_the_request_alone_with_its_status():
    rig = Rig()
    rig.add(1, "text")
    rig.add(2)
    rig.add(3, "text")
    rig.turn()
    rig.answer(1, FAILURE)
    rig.turn()
    assert rig.ends[1] == ended_by(FAILURE)
    # The other rank's answer comes too late.
    rig.answer(1, None)
    rig.answer(3, None, None)
    rig.turn(8)
    num_tokens = {handle: len(tokens) for handle, tokens in rig.frontend.tokens.items()}
    assert (num_tokens, rig.admitted()) == ({1: 0, 2: 3, 3: 3}, ["r2", "r3"])
    assert rig.ranks.dropped == ["r1", "r3"]
    assert rig.scheduler.stats().num_used_blocks == 0


def test_an_abort_while_it_is_prepared_ends_both():
    rig = Rig()
    rig.add(1, "text")
    rig.turn()
    rig.inbox.put(Abort("r1"))
    rig.turn()
    assert (rig.ends[1][0], rig.ranks.dropped) == (FinishReason.ABORT, ["r1"])
    rig.answer(1, None, None)
    rig.turn()
    assert (num_unfinished(rig.scheduler), rig.preparations.left_s()) == (0, None)


def test_its_own_deadline_holds_while_it_is_prepared():
    rig = Rig()
    rig.add(1, "text", deadline_at=rig.clock.now() + 2.0)
    rig.turn()
    rig.clock.advance(2.0)
    rig.turn()
    assert (rig.ends[1][0], rig.ranks.dropped) == (FinishReason.ABORT, ["r1"])


def test_beyond_the_limit_a_request_ends_without_having_been_sent():
    rig = Rig(max_preparations=2)
    for handle in range(4):
        rig.add(handle, "text")
    rig.turn()
    assert rig.ends == {2: ended_by(BUSY), 3: ended_by(BUSY)}
    assert (len(rig.ranks.sent), rig.ranks.dropped) == (2, [])
    rig.answer(0, None, None)
    rig.turn()
    rig.add(4, "text")
    rig.turn()
    assert 4 not in rig.ends


def test_an_account_has_its_share_of_a_limit_that_another_has_filled():
    rig = Rig(max_preparations=2)
    for handle, account in ((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "b")):
        rig.add(handle, "text", account=account)
    rig.turn()
    assert [request_id for _, request_id, _ in rig.ranks.sent] == ["r1", "r2", "r4"]
    shown = "3 requests wait for order, the limit is 2 (the account 'b' has 1, its share is 1)"
    assert rig.ends == {
        3: ended_by(BUSY),
        5: ended_by(RequestFailed("RESOURCE_EXHAUSTED", shown)),
    }


def test_the_time_is_for_each_account_whose_turn_may_come_before():
    rig = Rig()
    rig.add(1, "text", account="a")
    rig.add(2, "text", account="b")
    rig.turn()
    rig.clock.advance(2 * LIMIT_S - 0.1)
    rig.turn()
    assert not rig.ends
    rig.clock.advance(0.1)
    rig.turn()
    assert list(rig.ends) == [1]


def test_one_that_hangs_ends_and_those_behind_it_have_the_whole_time():
    rig = Rig()
    rig.add(1, "text")
    rig.turn()
    rig.clock.advance(LIMIT_S - 1.0)
    rig.add(2, "text")
    rig.turn()
    assert rig.preparations.left_s() == 1.0
    rig.clock.advance(1.0)
    rig.turn()
    assert (rig.ends, rig.ranks.dropped) == ({1: ended_by(LATE)}, ["r1"])
    assert rig.preparations.left_s() == LIMIT_S
    rig.answer(2, None, None)
    rig.turn(8)
    assert rig.ends[2][0] is FinishReason.LENGTH


def test_what_cannot_be_sent_ends_the_request_when_it_is_added():
    rig = Rig()
    rig.add(1, "unknown")
    rig.add(2)
    rig.turn(5)
    assert [rig.ends[handle][0] for handle in (1, 2)] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert (rig.preparations.left_s(), rig.ranks.dropped) == (None, [])


def test_ranks_that_are_lost_end_the_engine_and_not_the_request():
    rig = Rig()
    rig.add(1, "lost")
    with pytest.raises(DeviceLost):
        rig.turn()
    assert (rig.ends, rig.frontend.outbox.take()) == ({}, None)


@pytest.mark.parametrize("state", [PauseState.NEW, PauseState.ALL])
def test_a_pause_holds_a_prepared_request_as_any_other(state: PauseState):
    rig = Rig()
    rig.add(1, "text")
    rig.turn()
    rig.inbox.put(Call(lambda: rig.scheduler.set_pause(state)))
    rig.answer(1, None, None)
    rig.turn(3)
    assert rig.admitted() == []
    rig.inbox.put(Call(lambda: rig.scheduler.set_pause(PauseState.NONE)))
    rig.turn(6)
    assert rig.ends[1][0] is FinishReason.LENGTH


def test_preparation_ends_with_the_engine():
    rig = Rig()
    rig.add(1, "text")
    rig.turn()
    rig.engine.close()
    assert rig.ranks.is_stopped
