"""Penalties: their limits, and what an engine gets where the client or the model has none."""

from __future__ import annotations

import math

import pytest

from frontend_svc.text.model import GenerationDefaults
from tests.frontend_svc.options.asking import breaches, completed


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_taken(fields):
    assert breaches(**fields) == {}


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", "is 2.5, must be in -2..2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "is -2.5, must be in -2..2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "is 0.0, must be in 0.001..1000"),
        ({"repetition_penalty": math.inf}, "repetition_penalty", "is inf, must be in 0.001..1000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_violation_names_field_value_and_limit(fields, name, words):
    found = breaches(**fields)
    assert list(found) == [f"sampling.{name}"]
    assert f"sampling.{name}" in found[f"sampling.{name}"]
    assert words in found[f"sampling.{name}"]


@pytest.mark.parametrize(
    ("defaults", "fields", "sent"),
    [
        ((None, None, None), {}, (0.0, 0.0, 1.0)),
        ((0.5, -0.5, 1.25), {}, (0.5, -0.5, 1.25)),
        ((0.5, -0.5, 1.25), {"presence_penalty": 0.0, "repetition_penalty": 1.0}, (0.0, -0.5, 1.0)),
        ((None, None, None), {"frequency_penalty": 2.0, "repetition_penalty": 0.5}, (0.0, 2.0, 0.5)),
    ],
)
async def test_the_clients_value_comes_before_the_models_and_that_before_none(defaults, fields, sent):
    presence, frequency, repetition = defaults
    model = GenerationDefaults(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    asked = await completed(model, **fields)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == sent
