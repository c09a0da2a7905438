"""Penalties: what an engine gets where the client or the model has none."""

from __future__ import annotations

import pytest

from frontend_svc.text.model import GenerationDefaults
from tests.frontend_svc.options.asking import completed


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
