"""What an ADD may ask for of its forwards, and how it is written into steps."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from engine_svc.convert.feature import AddContext, Parsed
from engine_svc.features.forward_outputs.extras import ForwardOutputs, ForwardOutputSpec, PositionRun
from engine_svc.features.forward_outputs.wire import ForwardOutputsOfAdd
from tests.engine_svc.session.service_rig import make_entry, make_facts
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, step_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented

HIDDEN = 8
FACTS = replace(make_facts(), state_size=HIDDEN, expert_choices=(2, 3))


def entry_of(*, max_tokens: int = 4, **asked: bool) -> add_pb2.AddEntry:
    entry = make_entry(1, max_tokens=max_tokens)
    for name, value in asked.items():
        setattr(entry, name, value)
    return entry


def parse(entry: add_pb2.AddEntry, *, max_bytes: int = 1 << 20, facts=FACTS) -> Parsed | None:
    context = AddContext(facts, None, [5] * (len(entry.prompt_token_ids) // 4))
    return ForwardOutputsOfAdd(max_bytes).parse(entry, context)


@pytest.mark.parametrize(
    ("hidden_states", "routed_experts"), [(True, False), (False, True), (True, True)], ids=str
)
def test_a_request_that_asks_computes_its_whole_prompt(hidden_states, routed_experts):
    parsed = parse(entry_of(return_hidden_states=hidden_states, return_routed_experts=routed_experts))
    assert parsed.extra == ForwardOutputSpec(hidden_states, routed_experts)
    assert parsed.skips_reading_prefix_cache


def test_a_request_that_does_not_ask_has_no_part():
    assert parse(entry_of()) is None


def test_the_size_of_prompt_and_output_has_a_limit():
    # Five tokens of the prompt, four of the output.
    needed = 9 * HIDDEN * 4
    assert parse(entry_of(return_hidden_states=True), max_bytes=needed) is not None
    rule = f"return_hidden_states is {needed}, it takes at most {needed - 1} bytes"
    with pytest.raises(InvalidArgument, match=rule):
        parse(entry_of(return_hidden_states=True), max_bytes=needed - 1)
    assert parse(entry_of(return_routed_experts=True), max_bytes=9 * 2 * 3 * 4) is not None
    with pytest.raises(InvalidArgument, match="return_routed_experts is 216"):
        parse(entry_of(return_routed_experts=True), max_bytes=215)


def test_an_output_is_counted_up_to_the_models_length():
    entry = entry_of(return_hidden_states=True)
    entry.sampling.ClearField("max_tokens")
    needed = FACTS.max_model_len * HIDDEN * 4
    assert parse(entry, max_bytes=needed) is not None
    with pytest.raises(InvalidArgument, match=f"return_hidden_states is {needed}"):
        parse(entry, max_bytes=needed - 1)


def test_an_engine_that_does_not_serve_them_refuses_them_by_name():
    with pytest.raises(Unimplemented, match=r"return_hidden_states .*--max-forward-output-bytes") as caught:
        parse(entry_of(return_hidden_states=True), max_bytes=0)
    assert caught.value.metadata == {"fields": "return_hidden_states"}
    both = entry_of(return_hidden_states=True, return_routed_experts=True)
    with pytest.raises(Unimplemented, match=r"return_routed_experts .*does not report the experts"):
        parse(both, facts=replace(FACTS, expert_choices=(0, 0)))
    with pytest.raises(Unimplemented, match=r"return_hidden_states .*does not report its hidden states"):
        parse(both, facts=replace(FACTS, state_size=0))


def test_a_request_that_samples_nothing_is_refused():
    entry = entry_of(return_hidden_states=True)
    entry.pooling.CopyFrom(sampling_pb2.PoolingParams())
    with pytest.raises(InvalidArgument, match="must be false without sampling"):
        parse(entry)


def test_each_kind_is_a_tensor_with_its_first_position():
    states, experts = struct.pack("<6f", *range(6)), struct.pack("<12i", *range(12))
    step = step_pb2.Step()
    extra = ForwardOutputs((PositionRun(7, 3, states, experts, num_layers=2),))
    ForwardOutputsOfAdd(1).write(step, 4, extra, 0.0)
    first, second = step.extras
    assert (first.row, first.first_position, second.row, second.first_position) == (4, 7, 4, 7)
    assert first.hidden_states == tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[3, 2], inline=states)
    assert second.routed_experts == tensor_pb2.Tensor(
        dtype=tensor_pb2.D_TYPE_INT32, shape=[3, 2, 2], inline=experts
    )


def test_large_ones_are_divided_by_positions():
    states, experts = struct.pack("<600f", *range(600)), struct.pack("<1200i", *range(1200))
    whole = ForwardOutputs((PositionRun(5, 300, states, experts, num_layers=2),))
    parts = whole.split(1000)
    assert len(parts) > 3
    assert all(part.size_bytes <= 1000 for part in parts)
    runs = [run for part in parts for run in part.runs]
    assert [run.first_position for run in runs[1:]] == [run.end_position for run in runs[:-1]]
    assert (runs[0].first_position, runs[-1].end_position) == (5, 305)
    assert b"".join(run.hidden_states for run in runs) == states
    assert b"".join(run.routed_experts for run in runs) == experts
    assert parts[0].merged(parts[1]).runs == (*parts[0].runs, *parts[1].runs)
