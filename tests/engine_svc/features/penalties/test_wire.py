"""Which penalties an ADD may ask for, and what becomes of them."""

from __future__ import annotations

import pytest

from engine_svc.features.penalties.extras import Penalties
from tests.engine_svc.session.service_rig import make_entry, read_add
from triptych_kit.errors import InvalidArgument


def test_penalties_arrive_as_they_are_sent():
    entry = make_entry(1, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    assert read_add(entry).extras == {Penalties: Penalties(-2.0, 2.0, 1.5)}


def test_neutral_penalties_are_none():
    assert read_add(make_entry(1, presence_penalty=0.0, repetition_penalty=1.0)).extras == {}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", ["2.5", "-2..2"]),
        ({"frequency_penalty": -2.5}, "frequency_penalty", ["-2.5", "-2..2"]),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", ["nan"]),
        ({"repetition_penalty": 0.0}, "repetition_penalty", ["0.0", "0.001..1000"]),
        ({"repetition_penalty": float("inf")}, "repetition_penalty", ["inf", "1000"]),
        ({"repetition_penalty": float("nan")}, "repetition_penalty", ["nan"]),
        ({"repetition_penalty": 1e-30}, "repetition_penalty", ["0.001..1000"]),
        ({"repetition_penalty": 1001.0}, "repetition_penalty", ["1001", "1000"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_value_is_refused_with_field_value_and_limit(changes, field, words):
    with pytest.raises(InvalidArgument) as caught:
        read_add(make_entry(1, **changes))
    assert caught.value.violations[0][0] == field
    assert all(word in caught.value.message for word in words)
