"""Frontends refuse each value of a sampling parameter that breaks a rule of the contract, and no other."""

from __future__ import annotations

import pytest

from tests.field_values import FieldValue, field_values
from tests.frontend_svc.options.asking import VOCAB_SIZE, breaches
from triptych.common.v1 import sampling_pb2

# Constraints are for engines alone, and a pattern's size needs another field.
APART = ("structured_output", "repetition_detection.max_pattern_size")
VALUES = [
    value
    for value in field_values(sampling_pb2.SamplingParams.DESCRIPTOR, VOCAB_SIZE)
    if not value.path.startswith(APART)
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.path}-{value.keeps_rules}")
def test_a_value_is_refused_where_it_breaks_a_rule(value: FieldValue) -> None:
    field = f"sampling.{value.path}"
    assert set(breaches(**value.fields)) == (set() if value.keeps_rules else {field})


def test_numbers_texts_ids_enums_and_inner_messages_have_values() -> None:
    assert {value.path for value in VALUES if not value.keeps_rules} >= {
        "temperature", "top_k", "stop", "stop_token_ids", "output_kind", "logit_bias",
        "repetition_detection.min_count",
    }  # fmt: skip
