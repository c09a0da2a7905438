"""Keyword arguments become the API's fields, and nothing else does."""

from __future__ import annotations

import pytest

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_client.generate_request import GenerateOptions, build_generate_request


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
    assert GenerateOptions.__annotations__.keys() <= fields
