"""Keyword arguments become the API's fields, and nothing else does."""

from __future__ import annotations

import pytest

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_client.call_options import CallOptions
from triptych_client.generate_request import (
    GenerateOptions,
    StreamOptions,
    build_batch_request,
    build_generate_request,
)

INPUTS = ("prompt", "token_ids", "embeds")


def test_a_text_and_token_ids_are_different_inputs() -> None:
    assert build_generate_request("", {}).WhichOneof("input") == "prompt"
    assert list(build_generate_request([1, 2], {}).token_ids.ids) == [1, 2]


def test_options_go_where_the_api_has_them() -> None:
    request = build_generate_request(
        "a", {"model": "m", "priority": 0, "temperature": 0.0, "stop": ["x", "y"]}
    )
    assert request == generate_pb2.GenerateRequest(
        prompt="a",
        model="m",
        priority=0,
        sampling=sampling_pb2.SamplingParams(temperature=0.0, stop=["x", "y"]),
    )
    assert request.HasField("priority")
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")


def test_repetition_detection_is_an_option() -> None:
    detection = sampling_pb2.RepetitionDetection(max_pattern_size=8, min_count=3)
    request = build_generate_request("a", {"repetition_detection": detection})
    assert request.sampling.repetition_detection == detection


def test_no_option_leaves_sampling_unset() -> None:
    assert not build_generate_request("a", {}).HasField("sampling")


def test_one_stop_string_is_not_taken_for_its_letters() -> None:
    assert list(build_generate_request("a", {"stop": "end"}).sampling.stop) == ["end"]


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_generate_request("a", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


def test_every_declared_option_is_a_field_of_the_api() -> None:
    fields = {
        *generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name,
        *sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
    }
    of_call = CallOptions.__annotations__.keys()
    assert StreamOptions.__annotations__.keys() - of_call == fields - {*INPUTS, "sampling"}
    assert (
        GenerateOptions.__annotations__.keys() | {"orphan_grace_ms"} == StreamOptions.__annotations__.keys()
    )


def test_biases_are_by_token_and_output_kinds_by_word() -> None:
    sampling = build_generate_request("a", {"logit_bias": {7: -2.0}, "output_kind": "final_only"}).sampling
    assert list(sampling.logit_bias) == [sampling_pb2.LogitBias(token_id=7, bias=-2.0)]
    assert sampling.output_kind == sampling_pb2.OUTPUT_KIND_FINAL_ONLY
    with pytest.raises(ValueError, match="'all'"):
        build_generate_request("a", {"output_kind": "all"})  # type: ignore[typeddict-item]


def test_what_is_said_of_the_call_is_not_in_the_request() -> None:
    assert build_generate_request("a", {"timeout_s": 1.0, "metadata": {"a": "b"}}).ByteSize() == 3


def test_each_prompt_of_a_batch_may_have_options_of_its_own() -> None:
    each: list[GenerateOptions] = [{"seed": 1}, {"max_tokens": 9}]
    first, second = build_batch_request(["a", [1]], each, {"max_tokens": 3}).requests
    assert (first.sampling.seed, first.sampling.max_tokens, second.sampling.max_tokens) == (1, 3, 9)
    assert len(build_batch_request(["a", "b"], (), {}).requests) == 2
    with pytest.raises(ValueError, match="2 prompts and options for 1"):
        build_batch_request(["a", "b"], each[:1], {})
