"""The life of a request: which status leads to which, and what counts as its output."""

from __future__ import annotations

import pytest

from engine_svc.core.errors import InvalidTransition
from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.sampling_params import SamplingParams

ALLOWED = {
    ("BLOCKED", "WAITING"),
    ("BLOCKED", "FINISHED"),
    ("WAITING", "BLOCKED"),
    ("WAITING", "RUNNING"),
    ("WAITING", "FINISHED"),
    ("RUNNING", "BLOCKED"),
    ("RUNNING", "WAITING"),
    ("RUNNING", "FINISHED"),
}
PATHS = {"BLOCKED": [], "WAITING": ["WAITING"], "RUNNING": ["WAITING", "RUNNING"], "FINISHED": ["FINISHED"]}


@pytest.mark.parametrize("target", [status.name for status in RequestStatus])
@pytest.mark.parametrize("start", PATHS)
def test_only_the_moves_of_the_table_are_allowed(start: str, target: str):
    moved = Request("a", [1], 1, SamplingParams(max_tokens=1))
    for step in PATHS[start]:
        moved.move_to(RequestStatus[step])
    if (start, target) in ALLOWED:
        moved.move_to(RequestStatus[target])
        assert moved.status is RequestStatus[target]
    else:
        with pytest.raises(InvalidTransition, match=f"{start.lower()} cannot become {target.lower()}"):
            moved.move_to(RequestStatus[target])


def test_output_begins_behind_the_prompt():
    continued = Request("a", [1, 2, 3, 4, 5], 3, SamplingParams(max_tokens=8))
    assert continued.output_token_ids == [4, 5]
    assert (continued.num_tokens, continued.num_output_tokens) == (5, 2)


def test_requests_with_equal_content_are_different_requests():
    assert Request("a", [1], 1, SamplingParams(max_tokens=1)) != Request(
        "a", [1], 1, SamplingParams(max_tokens=1)
    )
