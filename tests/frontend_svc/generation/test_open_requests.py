"""Open requests by the ids that name them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from frontend_svc.generation.open_requests import OpenRequests, RequestPhase
from service_kit.clock import FakeClock
from service_kit.errors import NotFound


@dataclass
class FakeProgress:
    """A request that somebody sent."""

    phase: RequestPhase = RequestPhase.RUNNING
    num_prompt_tokens: int = 7
    num_cached_tokens: int = 4
    num_sampled_tokens: int = 3
    engine_id: str = "engine-1"
    num_attempts: int = 2
    num_ends: int = 0

    def end(self) -> None:
        self.num_ends += 1


def test_a_request_is_found_by_its_own_id_and_by_its_calls_while_it_is_open():
    requests = OpenRequests(FakeClock())
    with requests.track("mine", "call"):
        assert {requests.facts(name).request_id for name in ("mine", "call")} == {"mine"}
    for name in ("mine", "call"):
        with pytest.raises(NotFound, match=name):
            requests.facts(name)
    assert len(requests) == 0


def test_what_is_told_of_a_request_before_and_after_it_was_sent():
    clock = FakeClock()
    requests = OpenRequests(clock)
    with requests.track("", "call") as tracked:
        clock.advance(2.5)
        before = requests.facts("call")
        assert (before.phase, before.age_s, before.num_attempts) == (RequestPhase.QUEUED, 2.5, 0)
        tracked.follow(FakeProgress())
        after = requests.facts("call")
    assert (after.request_id, after.phase, after.engine_id) == ("call", RequestPhase.RUNNING, "engine-1")
    assert (after.num_prompt_tokens, after.num_cached_tokens, after.num_sampled_tokens) == (7, 4, 3)
    assert after.num_attempts == 2


def test_an_id_of_several_requests_aborts_all_and_tells_of_the_first():
    clock = FakeClock()
    requests = OpenRequests(clock)
    progresses = [FakeProgress(RequestPhase.FINISHED), FakeProgress(), FakeProgress()]
    with requests.track("a", "call") as first, requests.track("b", "call") as second:
        first.follow(progresses[0])
        second.follow(progresses[1])
        with requests.track("c", "other") as third:
            third.follow(progresses[2])
            assert requests.facts("call").request_id == "a"
            assert requests.abort("call") is RequestPhase.RUNNING
        assert requests.abort("a") is RequestPhase.FINISHED
    assert [progress.num_ends for progress in progresses] == [2, 1, 0]


def test_an_abort_before_it_was_sent_ends_it_when_it_is():
    requests = OpenRequests(FakeClock())
    progress = FakeProgress(RequestPhase.QUEUED)
    with requests.track("a", "") as tracked:
        assert requests.abort("a") is RequestPhase.QUEUED
        tracked.follow(progress)
    assert progress.num_ends == 1
