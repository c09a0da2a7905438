"""Numbers of JSON with all their digits."""

from __future__ import annotations

import json

import pytest

from triptych_kit import exact_json
from triptych_kit.exact_json import LongNumber

DIGITS = "0.12345678901234567890123"


@pytest.mark.parametrize(
    "text",
    [DIGITS, "12345678901234567890123", "1e400", "-0.10", '[1.50, {"a": 1E-7}, "\\u00e9", null, true]'],
)
def test_a_text_that_is_read_and_written_has_the_same_numbers(text: str) -> None:
    value = exact_json.loads(text)
    assert exact_json.loads(exact_json.dumps(value)) == value
    assert json.loads(exact_json.dumps(value)) == json.loads(text)
    if text.startswith(DIGITS):
        assert exact_json.dumps(value) == text


def test_a_long_number_is_a_float_that_is_written_with_its_digits() -> None:
    number = LongNumber.of(DIGITS)
    assert number == float(DIGITS)
    assert exact_json.dumps({"a": [number]}) == f'{{"a": [{DIGITS}]}}'
    assert type(LongNumber.of("0.50")) is float
    assert exact_json.dumps(LongNumber.of("1e400")) == "1e400"


def test_what_is_nested_deeply_is_written() -> None:
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"a": [deep]}
    assert exact_json.dumps(deep) == '{"a": [' * 10_000 + "{}" + "]}" * 10_000
