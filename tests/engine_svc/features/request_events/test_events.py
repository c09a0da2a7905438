"""Each event of a request is reported once, in order, with its age, in the first step of each admission."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert import messages
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.request import RequestOutput
from engine_svc.features.request_events import wire
from engine_svc.features.request_events.extras import RequestEvents
from engine_svc.features.request_events.scheduler import EventsOfAdmitted
from engine_svc.loop.step_output import StepOutput, split
from tests.engine_svc.scheduler.fakes import Stage, request
from triptych.engine.v1 import step_pb2


def step(stage: Stage) -> list[RequestOutput]:
    return stage.update(stage.schedule())


def events_in(outputs: list[RequestOutput]) -> dict[str, list[str]]:
    return {
        output.request_id: [name for name, _ in output.extras[RequestEvents].events]
        for output in outputs
        if output.extras
    }


def test_a_prompt_of_one_step_has_its_events_with_its_first_token_and_none_after_it():
    stage = Stage(features=[EventsOfAdmitted()])
    stage.add(request("a", 8), request("b", 8))
    assert events_in(step(stage)) == {"a": ["queued", "scheduled"], "b": ["queued", "scheduled"]}
    assert events_in(step(stage)) == {}


def test_a_prompt_of_several_steps_has_them_in_a_row_without_tokens():
    stage = Stage(features=[EventsOfAdmitted()], max_num_batched_tokens=5)
    stage.add(request("a", 8))
    (output,) = step(stage)
    assert (output.new_token_ids, output.finish_reason) == ([], None)
    assert events_in([output]) == {"a": ["queued", "scheduled"]}
    (output,) = step(stage)
    assert (output.new_token_ids, output.extras) == ([7], None)


def test_a_preemption_is_reported_with_the_return_to_the_batch():
    stage = Stage(features=[EventsOfAdmitted()])
    stage.add(request("a", 8), request("b", 8))
    stage.step()
    stage.scheduler.restrict(["a"], now=3.0)
    assert events_in(step(stage)) == {}
    stage.scheduler.restrict(None, now=4.0)
    assert events_in(step(stage)) == {"b": ["preempted", "resumed"]}


def test_events_of_a_step_that_was_rolled_back_come_with_the_next():
    stage = Stage(features=[EventsOfAdmitted()])
    stage.add(request("a", 8))
    stage.schedule()
    stage.scheduler.withdraw(now=3.0)
    assert events_in(step(stage)) == {"a": ["queued", "scheduled", "preempted", "resumed"]}


def test_a_request_of_one_token_has_its_events_and_nothing_of_it_is_kept():
    feature = EventsOfAdmitted()
    stage = Stage(features=[feature])
    stage.add(request("a", 8, max_tokens=1), request("b", 8))
    assert events_in(step(stage)) == {"a": ["queued", "scheduled"], "b": ["queued", "scheduled"]}
    stage.scheduler.abort(["b"], now=2.0)
    # The same id again, before the end of the first was noted with a step.
    stage.add(request("b", 8, max_tokens=1), request("c", 8))
    stage.scheduler.abort(["c"], now=2.0)
    assert events_in(step(stage)) == {"b": ["queued", "scheduled"]}
    assert (feature._requests, feature._num_reported, feature._ended) == ({}, {}, [])


def test_times_become_ages_when_the_message_is_written():
    output = StepOutput(3, [5, 6], [0, 1], [9], ended_at=12.5)
    earlier = RequestEvents((("queued", 10.0), ("scheduled", 11.0)))
    later = RequestEvents((("preempted", 12.0), ("resumed", 12.25)))
    output.extras[6] = {RequestEvents: earlier.merged(later)}
    features = WireFeatures([wire.make(EngineConfig(model="m"))])
    message = messages.to_step(output, {}, features, 13.0)
    assert message.age_us == 500_000
    assert [(event.row, event.kind, event.age_us) for event in message.events] == [
        (1, step_pb2.STEP_EVENT_KIND_QUEUED, 3_000_000),
        (1, step_pb2.STEP_EVENT_KIND_SCHEDULED, 2_000_000),
        (1, step_pb2.STEP_EVENT_KIND_PREEMPTED, 1_000_000),
        (1, step_pb2.STEP_EVENT_KIND_RESUMED, 750_000),
    ]


def test_events_of_a_step_that_is_too_large_are_sent_in_pieces_of_the_same_age():
    output = StepOutput(3, [5], [1], [9], ended_at=12.5)
    output.extras[5] = {RequestEvents: RequestEvents(tuple(("preempted", at) for at in range(20)))}
    pieces = split(output, 300)
    assert len(pieces) > 2
    assert {piece.ended_at for piece in pieces} == {12.5}
    found = [
        event
        for piece in pieces
        for extras in piece.extras.values()
        for event in extras[RequestEvents].events
    ]
    assert found == [("preempted", at) for at in range(20)]
