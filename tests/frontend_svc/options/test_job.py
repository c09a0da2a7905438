"""Jobs: what an engine gets of a turn and of its end, and where its turns go."""

from __future__ import annotations

import dataclasses

from frontend_svc.generation.caller import LOCAL_CALLER
from frontend_svc.generation.preprocess import prepare
from frontend_svc.text.prompt import RequestPrompt
from tests.frontend_svc.fakes import make_request
from tests.frontend_svc.options.asking import model_of, prepared
from triptych.engine.v1 import session_pb2


async def test_every_output_of_a_turn_has_the_job():
    made = await prepared(model_of(), n=2, job_id="a", is_last_step=True)
    assert [(entry.job_id, entry.is_last_step) for entry in made.entries] == [("a", True)] * 2


async def test_turns_of_a_job_go_to_one_engine():
    assert (await prepared(model_of(), job_id="a")).prompt.session_id == "a"


async def test_two_tenants_never_mean_the_same_job():
    keys = set()
    for tenant in "a", "b", "":
        identity = dataclasses.replace(LOCAL_CALLER.identity, tenant=tenant)
        caller = dataclasses.replace(LOCAL_CALLER, identity=identity)
        request = make_request([5], job_id="job")
        (entry,) = (await prepare(request, RequestPrompt(request), model_of(), caller)).entries
        keys.add(entry.job_id)
    assert len(keys) == 3


async def test_the_engine_gets_to_know_what_a_turn_has_called():
    hint_of = (await prepared(model_of(), job_id="a")).prompt.hint_of
    assert hint_of is not None
    assert [hint_of("search"), hint_of(""), hint_of(None)] == [
        session_pb2.FinishHint(tool_name="search"),
        session_pb2.FinishHint(tool_name=""),
        session_pb2.FinishHint(),
    ]


async def test_of_the_last_turn_and_of_requests_without_a_job_it_gets_to_know_nothing():
    for fields in {"job_id": "a", "is_last_step": True}, {"is_last_step": True}:
        made = await prepared(model_of(), **fields)
        assert made.prompt.hint_of is None
    assert not made.entries[0].is_last_step
