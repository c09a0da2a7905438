"""The job of an ADD: its key, its last turn, and policies that have none."""

from __future__ import annotations

import pytest

from engine_svc.convert.feature import AddContext, Parsed
from engine_svc.features.pins.extras import FinishHint, JobTurn
from engine_svc.features.pins.wire import JobOfAdd
from tests.engine_svc.session.service_rig import make_entry, make_facts, read_add
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import InvalidArgument


def parsed(*, is_used: bool = True, **fields: object) -> Parsed | None:
    entry = add_pb2.AddEntry(**fields)  # type: ignore[arg-type]
    return JobOfAdd(is_used=is_used).parse(entry, AddContext(make_facts(), None, [1, 2]))


def test_an_add_says_of_which_job_it_is_a_turn():
    part = parsed(job_id="a", is_last_step=True, tool_name="search", group_id="g", tenant="t")
    assert part == Parsed(
        JobTurn(is_last=True, tool="search", has_siblings=True, job_id="a", tenant="t"), job="1:ta"
    )


def test_no_two_tenants_share_a_job():
    parts = [parsed(job_id="bc", tenant="a"), parsed(job_id="c", tenant="ab"), parsed(job_id="abc")]
    assert len({part.job for part in parts if part is not None}) == 3


def test_without_a_job_there_is_nothing_to_do():
    assert parsed(is_last_step=True, tool_name="search") is None


def test_272_a_policy_that_serves_no_jobs_takes_the_fields():
    assert parsed(is_used=False, job_id="a") is None


@pytest.mark.parametrize(
    ("fields", "tool"), [({"tool_name": "search"}, "search"), ({"tool_name": ""}, ""), ({}, None)]
)
def test_a_hint_names_a_tool_says_that_there_is_none_or_does_not_know(
    fields: dict[str, str], tool: str | None
):
    assert JobOfAdd(is_used=True).read(session_pb2.FinishHint(handle=1, **fields)) == FinishHint(tool)


@pytest.mark.parametrize("name", ["x" * 257, "a\0"])
def test_a_hint_with_an_impossible_name_is_refused(name: str):
    with pytest.raises(InvalidArgument) as refused:
        JobOfAdd(is_used=True).read(session_pb2.FinishHint(tool_name=name))
    assert [field for field, _ in refused.value.violations] == ["tool_name"]


@pytest.mark.parametrize("field", ["job_id", "tool_name"])
@pytest.mark.parametrize("value", ["x" * 257, "a\0"])
def test_an_add_with_an_impossible_name_is_refused(field: str, value: str):
    entry = make_entry(1)
    setattr(entry, field, value)
    with pytest.raises(InvalidArgument) as refused:
        read_add(entry)
    assert [name for name, _ in refused.value.violations] == [field]
