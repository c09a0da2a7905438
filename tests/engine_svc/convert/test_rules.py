"""Engines refuse each sampling parameter of an ADD that breaks a rule of the contract, by its field."""

from __future__ import annotations

import pytest

from tests.engine_svc.fakes import VOCAB_SIZE
from tests.engine_svc.session.service_rig import make_entry, read_add
from tests.field_values import FieldValue, field_values
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument


def root_of(value: FieldValue) -> str:
    return value.path.partition(".")[0]


# Fields that are the frontend's, or a constraint's, which has its own tests.
APART = {"n", "stop", "bad_words", "structured_output"}
# Those that are taken with another field alone.
DEPENDENT = {"thinking_token_budget", "repetition_detection"}
VALUES = [
    value
    for value in field_values(sampling_pb2.SamplingParams.DESCRIPTOR, VOCAB_SIZE)
    if root_of(value) not in APART
]


def name_of(value: FieldValue) -> str:
    return f"{value.path}-{value.keeps_rules}"


@pytest.mark.parametrize("value", [one for one in VALUES if not one.keeps_rules], ids=name_of)
def test_a_value_that_breaks_a_rule_is_refused_by_field(value: FieldValue) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_add(make_entry(1, **value.fields))
    assert caught.value.violations[0][0] == value.path


@pytest.mark.parametrize(
    "value",
    [one for one in VALUES if one.keeps_rules and root_of(one) not in DEPENDENT],
    ids=name_of,
)
def test_the_ends_of_ranges_are_taken(value: FieldValue) -> None:
    read_add(make_entry(1, **value.fields))
