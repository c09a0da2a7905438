"""Parameters that engines alone read: their rules hold, and an engine gets them as they are."""

from __future__ import annotations

import pytest

from tests.frontend_svc.options.asking import breaches, completed


@pytest.mark.parametrize("value", [0, 64])
def test_the_ends_of_its_range_are_taken(value):
    assert breaches(max_draft_tokens=value) == {}


@pytest.mark.parametrize("value", [0, 64])
async def test_a_parameter_is_sent_as_it_is(value):
    sent = await completed(max_draft_tokens=value)
    assert (sent.HasField("max_draft_tokens"), sent.max_draft_tokens) == (True, value)


async def test_a_parameter_is_sent_only_where_it_is_set():
    assert not (await completed()).HasField("max_draft_tokens")


@pytest.mark.parametrize("value", [-1, 65])
def test_a_parameter_out_of_its_range_is_refused(value):
    message = f"sampling.max_draft_tokens is {value}, must be in 0..64"
    assert breaches(max_draft_tokens=value) == {"sampling.max_draft_tokens": message}
