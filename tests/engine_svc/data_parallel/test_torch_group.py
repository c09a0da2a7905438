"""Process groups of one process after the other: ranks meet, vote, resume, and end each other's waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from engine_svc.core.errors import PeersLost
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.torch_group import ProcessRankGroup, ProcessRankGroups, reach_store
from engine_svc.data_parallel.wake_signal import connect_signal_store
from engine_svc.data_parallel.wave import Vote
from engine_svc.model.expert_exchange import GroupExchange
from tests.engine_svc.ranks.shared_rig import HOST, TIMEOUT_S, in_threads, outcomes, vote


class Ranks:
    """The groups of several ranks in one process."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.makers = [
            ProcessRankGroups(
                GroupExchange(rank, size), host=HOST, device=torch.device("cpu"), timeout_s=timeout_s
            )
            for rank in range(size)
        ]
        self.groups: list[ProcessRankGroup] = []

    def form(self, generation: int = 1) -> list[ProcessRankGroup]:
        self.groups = in_threads([partial(self.meet, rank, generation) for rank in range(len(self.makers))])
        return self.groups

    def meet(self, rank: int, generation: int = 1) -> ProcessRankGroup:
        port = self.makers[0].store_port
        return self.makers[rank].form(Meeting(generation, rank, len(self.makers), HOST, port))

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for maker in self.makers:
            maker.close()


@pytest.fixture(params=[1, 2, 3], ids=lambda size: f"{size}-ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    made = Ranks(2)
    yield made
    made.close()


def test_all_ranks_find_the_verdict_of_all_votes(ranks):
    groups = ranks.form()
    votes = [vote(3 + rank, has_work=rank == 0, is_pausing=rank > 0, generation=7 - rank) for rank in
             range(len(groups))]  # fmt: skip
    for _ in range(3):
        verdicts = in_threads(
            [lambda group=group, own=own: group.count(own) for group, own in zip(groups, votes, strict=True)]
        )
        assert verdicts == [Vote.count(votes)] * len(groups)


def test_all_ranks_are_notified_when_the_last_has_resumed_and_then_vote(ranks):
    groups = ranks.form()
    done = [threading.Event() for _ in groups]
    for group, event in zip(groups[1:], done[1:], strict=True):
        group.when_all_resumed(5, event.set, pytest.fail)
    assert not any(event.is_set() for event in done)
    groups[0].when_all_resumed(5, done[0].set, pytest.fail)
    assert all(event.wait(TIMEOUT_S) for event in done)
    assert votes_of(groups, vote(2)) == [vote(2)] * len(groups)


def test_one_process_forms_one_group_after_the_other_and_keeps_nothing_of_them(pair):
    with_one: list[int] = []
    for generation in range(1, 9):
        pair.form(generation)
        assert votes_of(pair.groups) == [vote()] * 2
        with_one = with_one or [open_files(), num_native_threads()]
        for group in pair.groups:
            group.close()
    # The threads of a group end a moment after it, without an event.
    deadline = time.monotonic() + TIMEOUT_S
    while any(now > then for now, then in zip([open_files(), num_native_threads()], with_one, strict=True)):
        assert time.monotonic() < deadline, (open_files(), num_native_threads(), with_one)


def test_words_about_waves_of_earlier_generations_are_taken_out_of_the_store(pair):
    store = reach_store(HOST, pair.makers[0].store_port, TIMEOUT_S)
    for generation in (1, 2):
        signal_store = connect_signal_store(
            Meeting(generation, 0, 2, HOST, pair.makers[0].store_port), TIMEOUT_S
        )
        pair.form(generation)
        signal_store.signal(5)
        for group in pair.groups:
            group.close()
    assert [key for key in store.list_keys() if "generation" in key or "wake-signal" in key] == [
        "wake-signal-2/5"
    ]


def test_a_generation_number_may_come_again(pair):
    # As from a coordinator that was started anew.
    pair.form(1)
    for group in pair.groups:
        group.close()
    pair.form(1)
    assert votes_of(pair.groups) == [vote()] * 2


def test_who_closes_ends_the_waits_of_all_at_once(ranks):
    groups = ranks.form()
    if len(groups) == 1:
        groups[0].close()
        with pytest.raises(PeersLost, match="has left its group"):
            groups[0].count(vote())
        return
    lost = [threading.Event() for _ in groups]
    # All but the last wait, in a vote or for a resume; the last one's exchange is waited for as well.
    groups[0].when_all_resumed(5, pytest.fail, lost[0].set)
    with ThreadPoolExecutor(len(groups)) as threads:
        waiting: list[Future[object]] = [
            threads.submit(group.tensors.swap_numbers, (1, 2)) for group in groups[:-1]
        ]
        groups[-1].close()
        assert all(isinstance(future.exception(TIMEOUT_S / 2), PeersLost) for future in waiting)
    assert lost[0].wait(TIMEOUT_S / 2)
    assert all(
        isinstance(each, PeersLost) for each in outcomes([lambda g=g: g.count(vote()) for g in groups])
    )


def test_a_rank_that_closes_ends_its_own_waits(pair):
    group, _ = pair.form()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(group.count, vote()), threads.submit(group.tensors.swap_numbers, (1,))]
        group.close()
        assert all(isinstance(future.exception(TIMEOUT_S / 2), PeersLost) for future in waiting)


def test_ranks_that_do_not_come_or_answer_are_lost_after_the_timeout():
    # What is waited for in vain, and far longer than it takes to meet.
    ranks = Ranks(2, timeout_s=2.0)
    try:
        with pytest.raises(PeersLost):
            ranks.meet(1)
        # The next generation is not disturbed by what is left of it.
        group, _ = ranks.form(2)
        with pytest.raises(PeersLost):
            group.count(vote())
    finally:
        ranks.close()


def test_a_store_that_is_gone_is_a_lost_rank_at_once(pair):
    pair.makers[0].close()
    with pytest.raises(PeersLost, match=r"generation 1 does not meet: .*refused"):
        pair.meet(1)


@pytest.mark.parametrize("address", ["\ud800.invalid", "a" * 70 + ".invalid", "x..y"])
def test_a_host_that_can_be_none_is_a_lost_rank(pair, address):
    with pytest.raises(PeersLost, match="generation 1 does not meet"):
        pair.makers[1].form(Meeting(1, 1, 2, address, 7000))


def test_a_port_that_can_be_none_is_a_lost_rank(pair):
    with pytest.raises(PeersLost, match="generation 1 does not meet"):
        pair.makers[1].form(Meeting(1, 1, 2, HOST, 70_000))


def test_a_number_that_no_message_holds_is_a_lost_rank_and_ends_the_wait_of_the_other(pair):
    group, other = pair.form()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.count, vote())
        with pytest.raises(PeersLost):
            group.count(vote(2**64))
        assert isinstance(waiting.exception(TIMEOUT_S), PeersLost)


def test_ranks_hear_each_others_numbers(ranks):
    groups = ranks.form()
    results = in_threads([partial(group.swap_numbers, (group.meeting.rank, -7)) for group in groups])
    assert results == [[[rank, -7] for rank in range(len(groups))]] * len(groups)


def test_ranks_that_resume_with_other_weights_are_lost_to_each_other(pair):
    lost = [threading.Event() for _ in pair.form()]
    for group, event, weights in zip(pair.groups, lost, (5, -6), strict=True):
        group.when_all_resumed(weights, pytest.fail, event.set)
    assert all(event.wait(TIMEOUT_S) for event in lost)


def votes_of(groups: list[ProcessRankGroup], own: Vote | None = None) -> list[Vote]:
    """The verdicts that all ranks find when each has this to say."""
    return in_threads([partial(group.count, own or vote()) for group in groups])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
