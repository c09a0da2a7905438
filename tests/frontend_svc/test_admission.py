"""The limits of what may wait."""

from __future__ import annotations

import pytest

from frontend_svc.admission import Admission
from service_kit.errors import AlreadyExists, ResourceExhausted


def test_a_full_queue_refuses_with_the_limit_and_a_time_to_retry():
    admission = Admission(2, 100)
    with admission.queue(), admission.queue():
        expected = pytest.raises(ResourceExhausted, match="2 requests wait already, the limit is 2")
        with expected as caught, admission.queue():
            pass
        assert caught.value.retry_after_ms
    assert admission.num_queued == 0


def test_a_first_output_gives_the_place_back_once():
    admission = Admission(1, 100)
    with admission.queue() as ticket:
        admission.leave_queue(ticket)
        with admission.queue():
            assert admission.num_queued == 1
    assert admission.num_queued == 0


def test_prompt_tokens_are_limited_together_but_one_prompt_always_fits():
    admission = Admission(10, 100)
    with admission.queue() as first:
        admission.add_prompt(first, 150)
        with admission.queue() as second, pytest.raises(ResourceExhausted, match="prompt tokens"):
            admission.add_prompt(second, 1)
    with admission.queue() as third:
        admission.add_prompt(third, 100)


def test_an_id_in_flight_is_not_given_twice_and_free_afterwards():
    admission = Admission(10, 100)
    with admission.claim("x"), pytest.raises(AlreadyExists, match="'x'"), admission.claim("x"):
        pass
    with admission.claim("x"), admission.claim(""), admission.claim(""):
        pass
