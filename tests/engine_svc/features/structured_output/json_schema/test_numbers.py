"""The texts of numbers, by arithmetic over each of many texts; and which numbers a backend keeps itself."""

from __future__ import annotations

import random
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from engine_svc.features.structured_output.json_schema.numbers import (
    BOUNDS,
    MAX_WHOLE,
    Numbers,
    NumberTooLong,
    UnsupportedNumbers,
    exact,
    is_double,
    is_read_exactly,
    whole,
)

WHOLE = ("0", "1", "2", "9", "10", "11", "19", "20", "25", "99", "100", "101", "250")
BEHIND = ("", ".0", ".00", ".1", ".2", ".25", ".5", ".50", ".05", ".75", ".99", ".24", ".26", ".251", ".249")
TEXTS = [sign + before + behind for sign in ("", "-") for before in WHOLE for behind in BEHIND]
STEPS = ("1", "2", "5", "0.25", "0.5", "0.1", "0.01", "2.5", "10", "20", "4", "0.125", "1.25", "25", "0.05")


def drawn_number(noise: random.Random) -> Any:
    digits = noise.choice((0, 1, 2, 5, 9, 10, 25, 99, 100, 125, 250, 999, noise.randint(0, 3000)))
    return exact(str(Decimal(digits * noise.choice((1, -1))).scaleb(-noise.choice((0, 0, 1, 2, 3)))))


def is_member(text: str, keywords: dict[str, Any], *, is_integer: bool) -> bool:
    value = Fraction(text)
    limits = {name: Fraction(limit) for name, limit in keywords.items()}
    return (
        not (is_integer and "." in text)
        and value >= limits.get("minimum", value)
        and value <= limits.get("maximum", value)
        and ("exclusiveMinimum" not in limits or value > limits["exclusiveMinimum"])
        and ("exclusiveMaximum" not in limits or value < limits["exclusiveMaximum"])
        and value % limits.get("multipleOf", value or 1) == 0
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_texts_are_those_of_the_numbers(seed: int) -> None:
    noise = random.Random(seed)
    for _ in range(30):
        keywords = {name: drawn_number(noise) for name in BOUNDS if noise.random() < 0.35}
        if noise.random() < 0.4:
            keywords["multipleOf"] = exact(noise.choice(STEPS))
        is_integer = noise.random() < 0.3
        numbers = Numbers.of(keywords, is_integer=is_integer)
        patterns = [] if numbers.is_empty else [re.compile(pattern) for pattern in numbers.patterns()]
        for text in TEXTS:
            has_text = not numbers.is_empty and all(pattern.fullmatch(text) for pattern in patterns)
            expected = is_member(text, keywords, is_integer=is_integer)
            assert has_text == expected, f"{keywords}, integer {is_integer}: {text}"


def test_numbers_are_read_with_all_their_digits() -> None:
    assert exact("9007199254740993.0") == 9007199254740993
    assert exact("1e2") == 100
    assert isinstance(exact("1e2"), int)
    assert exact("-0.0") == 0
    assert exact("0.1") == Decimal("0.1")
    assert exact("1e399") == 10**399
    for text, read in (("1e400", exact), ("1e-500", exact), ("1e999999999", exact), ("1" * 500, whole)):
        with pytest.raises(NumberTooLong):
            read(text)


def test_only_numbers_that_doubles_keep_apart_are_left_to_a_backend() -> None:
    assert Numbers.of({"minimum": 0, "maximum": MAX_WHOLE}, is_integer=True).keywords() is not None
    assert Numbers.of({"minimum": 0, "maximum": MAX_WHOLE + 1}, is_integer=True).keywords() is None
    assert Numbers.of({"minimum": 0, "exclusiveMaximum": 1}, is_integer=False).keywords() is not None
    assert Numbers.of({"maximum": Decimal("0.5")}, is_integer=False).keywords() is None
    assert Numbers.of({"maximum": Decimal("2.5")}, is_integer=True).keywords() == {
        "type": "integer",
        "maximum": 2,
    }
    assert is_double(Decimal("0.1"))
    assert not is_double(Decimal("0.1000000000000000055"))
    assert is_read_exactly(Decimal("0.3"))
    assert not is_read_exactly(Decimal("0.07"))


def test_an_empty_set_is_known_as_one() -> None:
    for keywords, is_integer in (
        ({"minimum": 1, "maximum": 0}, False),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, True),
        ({"minimum": 1, "maximum": 3, "multipleOf": 7}, False),
        ({"minimum": Decimal("0.1"), "maximum": Decimal("0.9")}, True),
        ({"minimum": 1, "exclusiveMaximum": 1}, False),
    ):
        assert Numbers.of(keywords, is_integer=is_integer).is_empty


def test_multiples_without_endings_have_no_pattern() -> None:
    with pytest.raises(UnsupportedNumbers, match="multiples of 7 "):
        Numbers.of({"multipleOf": 7, "minimum": 1 << 60}, is_integer=True).patterns()


def test_bounds_of_many_digits_are_short_patterns() -> None:
    bound = 10**308 + 7
    patterns = Numbers.of({"minimum": -bound, "maximum": bound}, is_integer=False).patterns()
    for text, expected in ((str(bound), True), (str(bound + 1), False), (f"-{bound}.0", True)):
        assert all(re.fullmatch(pattern, text) for pattern in patterns) == expected
    assert sum(map(len, patterns)) < 500_000
