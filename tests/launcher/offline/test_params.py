from __future__ import annotations

import dataclasses

import pytest

from launcher.offline.params import RepetitionDetection, SamplingParams, StructuredOutput, from_proto
from service_kit.errors import InvalidArgument
from triptych.common.v1 import sampling_pb2

# What a stream's messages look like is nothing for a facade that returns whole results.
OF_STREAMS = {"output_kind", "stream_interval"}


def test_every_parameter_of_the_contract_has_its_field_of_the_same_name() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert ours == set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - OF_STREAMS


def test_what_is_not_given_is_unset() -> None:
    assert SamplingParams().to_proto() == sampling_pb2.SamplingParams()


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "min_tokens", "logprobs", "detokenize"])
def test_a_zero_that_is_given_is_set(name: str) -> None:
    message = SamplingParams(**{name: 0}).to_proto()
    assert message.HasField(name)


def test_all_kinds_of_values_arrive() -> None:
    message = SamplingParams(
        temperature=0.5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias={5: -1.0, 6: 2.0},
        structured_output=StructuredOutput(choice=["yes", "no"]),
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
    ).to_proto()
    assert message == sampling_pb2.SamplingParams(
        temperature=0.5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias=[
            sampling_pb2.LogitBias(token_id=5, bias=-1.0),
            sampling_pb2.LogitBias(token_id=6, bias=2.0),
        ],
        structured_output=sampling_pb2.StructuredOutput(
            choice=sampling_pb2.StructuredChoice(choices=["yes", "no"])
        ),
        repetition_detection=sampling_pb2.RepetitionDetection(max_pattern_size=4, min_count=3),
    )


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="end").to_proto().stop == ["end"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("max_tokens", 1.5),
        ("seed", -1),
        ("stop_token_ids", ["a"]),
        ("logit_bias", [5]),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"sampling_params.{name} is") as raised:
        SamplingParams(**{name: value}).to_proto()
    assert raised.value.violations[0][0] == f"sampling_params.{name}"


@pytest.mark.parametrize("value", [True, False, 5.0, 5.5, "5"])
@pytest.mark.parametrize("name", ["thinking_token_budget", "max_tokens", "n"])
def test_127_a_budget_is_a_whole_number_and_neither_a_truth_value_nor_a_float(
    name: str, value: object
) -> None:
    with pytest.raises(InvalidArgument, match=f"sampling_params.{name} is {value!r}"):
        SamplingParams(**{name: value}).to_proto()


def test_127_a_truth_value_is_no_number_and_a_number_no_truth_value() -> None:
    for name, value in (("temperature", True), ("stop_token_ids", [True]), ("logit_bias", {True: 1.0})):
        with pytest.raises(InvalidArgument, match=f"sampling_params.{name} is"):
            SamplingParams(**{name: value}).to_proto()
    assert SamplingParams(ignore_eos=True, detokenize=False).to_proto().ignore_eos


def test_defaults_of_a_model_come_back_as_parameters() -> None:
    params = SamplingParams(temperature=0.5, top_k=20, max_tokens=7)
    assert from_proto(params.to_proto()) == params
