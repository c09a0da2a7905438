"""Packed columns, as they should be and as they should not."""

from __future__ import annotations

from array import array

import pytest

from frontend_svc.engines.connection.columns import MalformedStep, read_step
from frontend_svc.output.collector import DraftUse, Ending, EndReason
from frontend_svc.output.engine_times import EventKind, Progress
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2


def u32(*values: int) -> bytes:
    return array("I", values).tobytes()


def test_columns_of_rows_with_and_without_tokens():
    step = step_pb2.Step(handles=u32(7, 2**32 - 1, 9), num_tokens=bytes([2, 0, 1]), token_ids=u32(1, 2, 3))
    step.finished.add(row=1, reason=output_pb2.FINISH_REASON_ABORT)
    step.finished.add(row=2, reason=output_pb2.FINISH_REASON_STOP, stop_token_id=0)
    step.finished[1].drafts.num_proposed, step.finished[1].drafts.num_accepted = 5, 3
    step.first.add(row=0, num_cached_tokens=48)

    columns = read_step(step)

    assert list(columns.handles) == [7, 2**32 - 1, 9]
    assert list(columns.num_tokens) == [2, 0, 1]
    assert columns.token_ids == [1, 2, 3]
    assert columns.endings == {
        1: Ending(EndReason.ABORT),
        2: Ending(EndReason.STOP, stop_token_id=0, drafts=DraftUse(5, 3)),
    }
    assert columns.cached == {0: 48}
    assert columns.progress == {0: Progress(first_age_ns=0)}


def test_what_happened_to_requests_is_read_by_row_and_what_is_unknown_ignored():
    step = step_pb2.Step(handles=u32(7, 8, 9), token_ids=u32(1), num_tokens=bytes([0, 1, 0]), age_us=30)
    step.first.add(row=1, prefill_stats=step_pb2.PrefillStats(prefill_us=5))
    for row, kind, age_us in (
        (1, step_pb2.STEP_EVENT_KIND_QUEUED, 90),
        (1, step_pb2.STEP_EVENT_KIND_SCHEDULED, 40),
        (2, step_pb2.STEP_EVENT_KIND_PREEMPTED, 20),
        (2, step_pb2.STEP_EVENT_KIND_RESUMED, 10),
    ):
        step.events.add(row=row, kind=kind, age_us=age_us)
    newer = step_pb2.Step.FromString(step.SerializeToString() + b"\x5a\x04\x08\x00\x10\x63")
    assert read_step(newer).progress == {
        1: Progress([(EventKind.QUEUED, 90_000), (EventKind.SCHEDULED, 40_000)], 30_000, 5_000),
        2: Progress([(EventKind.PREEMPTED, 20_000), (EventKind.RESUMED, 10_000)]),
    }
    step.events.add(row=3)
    with pytest.raises(MalformedStep, match="event row 3"):
        read_step(step)


@pytest.mark.parametrize("reason", EndReason)
def test_every_reason_of_the_contract_is_known(reason):
    finished = step_pb2.StepFinished(
        row=0, reason=output_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    )
    assert read_step(step_pb2.Step(handles=u32(1), finished=[finished])).endings == {0: Ending(reason)}


def test_a_reason_of_a_newer_engine_ends_the_request_and_not_the_stream():
    finished = step_pb2.StepFinished.FromString(
        step_pb2.StepFinished(row=0).SerializeToString() + b"\x10\x63"
    )
    step = step_pb2.Step(handles=u32(1), finished=[finished])
    message = "the engine ended it with finish reason 99, unknown here"
    assert read_step(step).endings == {0: Ending(EndReason.ERROR, message=message)}


def test_a_token_outside_the_vocabulary_is_malformed():
    step = step_pb2.Step(handles=u32(1), num_tokens=b"\x01", token_ids=u32(100))
    assert read_step(step, 101).token_ids == [100]
    with pytest.raises(MalformedStep, match="token id 100 is outside the vocabulary of 100"):
        read_step(step, 100)


def test_wide_counts_and_no_counts():
    wide = step_pb2.Step(handles=u32(1), num_tokens_wide=u32(300), token_ids=u32(*range(300)))
    assert list(read_step(wide).num_tokens) == [300]
    assert list(read_step(step_pb2.Step(handles=u32(1, 2))).num_tokens) == [0, 0]
    assert list(read_step(step_pb2.Step()).handles) == []


@pytest.mark.parametrize(
    "step",
    [
        step_pb2.Step(handles=b"123"),
        step_pb2.Step(handles=u32(1), num_tokens=bytes([1])),
        step_pb2.Step(handles=u32(1), num_tokens=bytes([1, 1]), token_ids=u32(1, 2)),
        step_pb2.Step(handles=u32(1), token_ids=u32(1)),
        step_pb2.Step(handles=u32(1), finished=[step_pb2.StepFinished(row=1, reason=1)]),
        step_pb2.Step(handles=u32(1), first=[step_pb2.StepFirst(row=5)]),
        step_pb2.Step(handles=u32(1), finished=[step_pb2.StepFinished(row=0)]),
        step_pb2.Step(
            handles=u32(1),
            num_tokens=bytes([2]),
            token_ids=u32(1, 2),
            parts=[step_pb2.StepParts(row=0, num_tokens=[1, 2])],
        ),
        step_pb2.Step(handles=u32(1), parts=[step_pb2.StepParts(row=1)]),
    ],
)
def test_columns_that_do_not_fit_are_malformed(step):
    with pytest.raises(MalformedStep):
        read_step(step)


def test_what_rows_have_beside_tokens_is_handed_on_by_row():
    step = step_pb2.Step(handles=u32(7, 9))
    first, second = step.extras.add(row=1, nan_count=3), step.extras.add(row=1, nan_count=4)
    assert read_step(step).extras == {1: [first, second]}
    step.extras.add(row=2)
    with pytest.raises(MalformedStep, match="an extra row 2 is beyond the 2 rows"):
        read_step(step)
