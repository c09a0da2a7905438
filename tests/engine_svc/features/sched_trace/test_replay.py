"""A replay names the first difference, and reads what an engine has left, however it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from engine_svc.core.request import ContentSpan, InputSegment, Request
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.features.sched_trace.recorded_case import SUFFIX, read_case
from engine_svc.features.sched_trace.records import (
    Record,
    encode,
    read_request,
    read_segment,
    request_record,
    segment_record,
)
from engine_svc.features.sched_trace.replay import BadTrace, read_lines, replay
from tests.conformance.test_recorded_cases import CASES, PATHS
from tests.engine_svc.features.sched_trace.tracing import SETUP, Tracing, build, replayed, request


def traced() -> list[Record]:
    """Two requests with one prompt, one after the other."""
    tracing = Tracing()
    tracing.scheduler.add(request("r0", num_tokens=9, max_tokens=3))
    tracing.step(0.5)
    tracing.scheduler.add(request("r1", num_tokens=9, max_tokens=3))
    for index in range(3):
        tracing.step(1.0 + index)
    return tracing.end()


def lines_of(records: list[Record]) -> list[bytes]:
    return [encode(record).encode() + b"\n" for record in records]


def test_what_the_kv_of_a_segment_depends_on_is_in_its_record():
    spans = (ContentSpan(1, 2, "image"), ContentSpan(4, 3, "tiles", tokens=(1,)))
    segment = InputSegment([1, 2, 3], SamplingParams(3), spans=spans)
    assert read_segment(json.loads(encode(segment_record(segment, ())))) == segment


def test_every_parameter_of_a_request_is_in_its_record():
    sampling = SamplingParams(
        max_tokens=3,
        temperature=0.25,
        top_k=4,
        top_p=0.5,
        seed=2**63 + 1,
        min_tokens=2,
        ignore_eos=True,
        eos_token_id=7,
        stop_token_ids=frozenset({9, 8}),
        skip_reading_prefix_cache=True,
        repetition=RepetitionLimits(3),
        min_p=0.1,
        logprobs=1,
        logprob_token_ids=(5, 6),
        max_draft_tokens=2,
    )
    unset = SamplingParams(3)
    assert not [
        each.name
        for each in fields(sampling)
        if each.name != "max_tokens" and getattr(sampling, each.name) == getattr(unset, each.name)
    ]
    record = json.loads(encode(request_record(Request("r0", [1, 2], 2, sampling))))
    assert read_request(record).sampling == sampling
    # Recorded before there were such parameters.
    older = {name: value for name, value in record.items() if name not in ("temperature", "max_draft_tokens")}
    assert read_request(older).sampling == replace(sampling, temperature=1.0, max_draft_tokens=None)


CHANGES: dict[str, tuple[Callable[[list[Record]], object], str]] = {
    "queue": (lambda records: records[3]["running"].append("r9"), "step 2: step_snapshot.running is"),
    "blocks": (lambda records: records[3].update(free_blocks=1), "step 2: step_snapshot.free_blocks is 22"),
    "hit": (lambda records: records[4].update(local_hit_tokens=4), "step 2: prefix_cache_event.local_hit"),
    "order": (
        lambda records: records[5].update(
            num_scheduled_tokens=dict(reversed(records[5]["num_scheduled_tokens"].items()))
        ),
        "step 2: step_decision.num_scheduled_tokens is",
    ),
    "block ids": (
        lambda records: records[5]["block_ids"]["r1"]["new"][0].append(9),
        "step 2: step_decision.block_ids is",
    ),
    "prefix": (
        lambda records: records[3]["events"][1]["request"].update(prompt=[1] * 9),
        "step 2: prefix_cache_event.local_hit_tokens is 0 instead of 8",
    ),
    "end": (
        lambda records: records[-1]["events"][0]["outputs"][0].update(finish="stop"),
        "the outputs of update is",
    ),
    "missing": (lambda records: records.pop(4), "step 2: step_decision.kind is"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_the_first_difference_is_named(change: Callable[[list[Record]], object], words: str):
    records = traced()
    assert replayed(records).difference is None
    change(records)
    difference = replayed(records).difference
    assert difference is not None
    assert words in difference


def test_each_run_of_a_file_is_replayed_and_one_that_was_killed_up_to_there():
    lines = lines_of(traced())
    killed = [*lines[:-2], lines[-2][:40] + b"\n"]
    runs = list(replay(read_lines([*killed, *lines, *lines[:5], lines[5][:20]]), build))
    assert [(run.difference, run.is_cut) for run in runs] == [(None, True), (None, False), (None, True)]
    assert [run.num_steps for run in runs] == [3, 4, 1]


def test_a_run_that_was_killed_within_its_first_line_hides_no_later_one():
    lines = lines_of(traced())
    (run,) = replay(read_lines([lines[0][:40] + b"\n", *lines]), build)
    assert (run.difference, run.is_cut, run.num_steps) == (None, False, 4)


@pytest.mark.parametrize("num_records", range(1, 12))
def test_a_trace_that_ends_early_replays_up_to_there(num_records: int):
    records = traced()[:num_records]
    assert replayed(records).difference is None


BAD: dict[str, tuple[list[bytes], str]] = {
    "text": ([b"hello\n"], "line 1 is not JSON"),
    "lines of text": ([b"hello\n", b"world\n"], "line 1 is not JSON"),
    "nested": ([lines_of(traced())[0], b"[" * 200_000, *lines_of(traced())[1:]], "line 2 is not JSON"),
    "other json": ([b"[1]\n"], "line 1 is no record"),
    "without its head": (lines_of(traced())[1:], "line 1 is no record"),
    "broken within": ([*lines_of(traced())[:2], b'{"ki\n', *lines_of(traced())[2:]], "line 3 is not JSON"),
    "format": ([b'{"trace": {"format": 2}}\n'], "record 1 .*the format of the trace is 2"),
    "kind": ([lines_of(traced())[0], b'{"kind": "pin"}\n'], "record 2 .*of the kind pin"),
    "fields": ([lines_of(traced())[0], b'{"kind": "step_snapshot"}\n'], "record 2 .*KeyError: 'step'"),
    "value": (
        [lines_of(traced())[0].replace(b'"op":"add"', b'"op":"pause","state":"?"')],
        "record 1 of step 1 .*'\\?' is not a valid PauseState",
    ),
    "configuration": ([b'{"trace": {"format": 1, "config": {}}}\n'], "record 1 .*kv_groups"),
}


@pytest.mark.parametrize(("lines", "words"), BAD.values(), ids=BAD)
def test_what_is_no_trace_is_refused(lines: list[bytes], words: str):
    with pytest.raises(BadTrace, match=words):
        list(replay(read_lines(lines), build))


def test_a_policy_that_is_not_installed_is_refused_by_name():
    records = Tracing().end()
    records[0]["trace"]["config"]["policy"] = "mine"
    with pytest.raises(BadTrace, match="--scheduling-policy is 'mine'"):
        replayed(records)


# Those whose requests wait for a grammar need more than a scheduler. Later turns of sessions have no first
# output in them, and tables of states no entries without a block.
_NOT_WHOLE = {"grammar", "sessions", "state"}
WHOLE = {name for name, case in CASES.items() if not _NOT_WHOLE & set(case.get("needs", ()))}


@pytest.mark.parametrize("path", [path for path in PATHS if path.name.removesuffix(SUFFIX) in WHOLE][::7])
def test_recorded_cases_of_the_earlier_format_are_read(path: Path):
    (run,) = replay(read_case(path), build)
    assert run.difference is None
    assert run.num_steps > 0


def test_the_setup_of_a_trace_is_read_back():
    setup = replace(SETUP, policy="priority", scheduler_class="mine")
    assert type(setup).read(setup.to_record()) == setup
