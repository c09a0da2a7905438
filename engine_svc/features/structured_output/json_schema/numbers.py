"""Sets of numbers that schemas describe, exactly, and the texts in which their members are written.

Numbers are int and Decimal; a Decimal is never whole. Texts have no exponent where a bound or a multiple
limits them, integers have no fraction, and other numbers may have zeros at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from typing import Any, TypeAlias

Number: TypeAlias = int | Decimal

MAX_DIGITS = 400  # before the point of a number, and behind it; doubles have at most 309 and 324
MAX_WHOLE = (1 << 53) - 1  # to which llguidance and xgrammar, whose numbers are doubles, keep integers apart
MAX_READ = 1 << 32  # of a multiple, for llguidance
MAX_LISTED = 64  # members of a set that are written one by one
MAX_ENDINGS = 1_000  # of the multiples of a number
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_INTEGER = "(?:0|[1-9][0-9]*)"
_ANY_FRACTION = r"(?:\.[0-9]+)?"
_ZEROS = r"(?:\.0+)?"


class NumberTooLong(ValueError):
    """A number has more digits than MAX_DIGITS."""


class UnsupportedNumbers(ValueError):
    """A set whose texts are no pattern of a limited size; the message gives the reason."""


def whole(text: str) -> int:
    """The integer of a JSON text."""
    if len(text.removeprefix("-")) > MAX_DIGITS:
        raise NumberTooLong(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


def exact(text: str) -> Number:
    """The number of a JSON text with a fraction or an exponent."""
    number = Decimal(text)
    if number == 0:
        return 0
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), "JSON has finite numbers alone"
    if len(digits) + exponent > MAX_DIGITS or -exponent > MAX_DIGITS + len(digits):
        raise NumberTooLong(f"a number has more than {MAX_DIGITS} digits")
    fraction = Fraction(number)
    return fraction.numerator if fraction.denominator == 1 else number


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers between two bounds, perhaps integers alone, perhaps multiples of one number alone."""

    low: Number | None = None
    high: Number | None = None
    is_low_open: bool = False  # the bound itself is no member
    is_high_open: bool = False
    is_integer: bool = False
    multiple: Fraction | None = None

    @classmethod
    def of(cls, schema: Mapping[str, Any], *, is_integer: bool) -> Numbers:
        """Those that the keywords of a schema describe."""
        numbers = cls(is_integer=is_integer)
        for keyword in BOUNDS:
            if keyword in schema:
                value, is_open = schema[keyword], keyword.startswith("exclusive")
                is_low = keyword.endswith("inimum")
                bound = cls(value, None, is_open) if is_low else cls(None, value, False, is_open)
                numbers &= bound
        if "multipleOf" in schema:
            numbers &= cls(multiple=Fraction(schema["multipleOf"]))
        return numbers

    @classmethod
    def only(cls, value: Number) -> Numbers:
        return cls(value, value, is_integer=isinstance(value, int))

    def __and__(self, other: Numbers) -> Numbers:
        low, is_low_open = _stricter(self.low, self.is_low_open, other.low, other.is_low_open, 1)
        high, is_high_open = _stricter(self.high, self.is_high_open, other.high, other.is_high_open, -1)
        multiples = [number for number in (self.multiple, other.multiple) if number is not None]
        return Numbers(
            low,
            high,
            is_low_open,
            is_high_open,
            self.is_integer or other.is_integer,
            reduce(_common_multiple, multiples) if multiples else None,
        )

    @property
    def step(self) -> Fraction | None:
        """The distance between neighbours; None where there is a number between any two."""
        if self.multiple is None:
            return Fraction(1) if self.is_integer else None
        return _common_multiple(self.multiple, Fraction(1)) if self.is_integer else self.multiple

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The first and the last member as multiples of the step."""
        step = self.step
        assert step is not None, "members have neighbours"
        first = last = None
        if self.low is not None:
            ratio = Fraction(self.low) / step
            first = math.floor(ratio) + 1 if self.is_low_open else math.ceil(ratio)
        if self.high is not None:
            ratio = Fraction(self.high) / step
            last = math.ceil(ratio) - 1 if self.is_high_open else math.floor(ratio)
        return first, last

    @property
    def is_whole(self) -> bool:
        """Whether all members are integers."""
        if self.step is not None:
            return self.step.denominator == 1
        return self.low == self.high and isinstance(self.low, int)

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        if self.step is not None:
            first, last = self.limits
            return first is not None and last is not None and first > last
        return self.low > self.high or (self.low == self.high and (self.is_low_open or self.is_high_open))

    def keywords(self) -> dict[str, Any] | None:
        """Keywords with which llguidance writes all of these numbers and no other; None without such."""
        if self.step is not None and self.step.denominator == 1:
            first, last = self.limits
            step = self.step.numerator
            if first is None and last is None:
                return {"type": "integer"} | ({"multipleOf": step} if step > 1 else {})
            bounds = {"minimum": first, "maximum": last}
            written = {name: count * step for name, count in bounds.items() if count is not None}
            if all(abs(bound) <= MAX_WHOLE for bound in written.values()):
                return {"type": "integer"} | written | ({"multipleOf": step} if step > 1 else {})
            return None
        if self.step is not None and not self._has_native_step():
            return None
        if self.low == self.high and self.low is not None:
            return {"const": self.low} if is_double(self.low) else None
        limits = {
            "exclusiveMinimum" if self.is_low_open else "minimum": self.low,
            "exclusiveMaximum" if self.is_high_open else "maximum": self.high,
        }
        given = {name: bound for name, bound in limits.items() if bound is not None}
        if all(isinstance(bound, int) and abs(bound) <= MAX_WHOLE for bound in given.values()):
            multiple = {} if self.step is None else {"multipleOf": _decimal(self.step)}
            return {"type": "number"} | given | multiple
        return None

    def _has_native_step(self) -> bool:
        """Whether llguidance alone writes the multiples, by a state for each remainder."""
        assert self.step is not None, "members have neighbours"
        try:
            _multiples(self.step, self.is_integer)
        except UnsupportedNumbers:
            return is_read_exactly(_decimal(self.step))
        return False

    def patterns(self) -> list[str]:
        """Regular expressions that the texts of these numbers, which are not empty, match all."""
        if self.step is None:
            return self._between() or [f"-?{_INTEGER}{_ANY_FRACTION}(?:[eE][+-]?[0-9]+)?"]
        first, last = self.limits
        if first is not None and last is not None and last - first < MAX_LISTED:
            texts = (_of_value(count * self.step, self.is_integer) for count in range(first, last + 1))
            return ["|".join(texts)]
        bounds = self if not self.is_integer else self._whole()
        return [*bounds._between(), _multiples(self.step, self.is_integer)]

    def _whole(self) -> Numbers:
        """Numbers between the first and the last member."""
        assert self.step is not None, "integers have neighbours"
        low, high = (None if count is None else int(count * self.step) for count in self.limits)
        return Numbers(low, high)

    def _between(self) -> list[str]:
        patterns = []
        if self.low is not None:
            patterns.append(_at_least(self.low, self.is_low_open))
        if self.high is not None:
            patterns.append(_at_most(self.high, self.is_high_open))
        return patterns


def is_double(number: Number) -> bool:
    """Whether a double that is written in its shortest form is the number."""
    if isinstance(number, int):
        return abs(number) <= MAX_WHOLE
    return Decimal(repr(float(number))) == number


def is_read_exactly(multiple: Number) -> bool:
    """Whether llguidance reads a `multipleOf` as the number that it is: it multiplies the double by ten."""
    if multiple >= MAX_READ:
        return False
    value, behind = float(multiple), 0
    while value % 1 and value < MAX_WHOLE:
        value, behind = value * 10, behind + 1
    return Fraction(int(value), 10**behind) == Fraction(multiple)


def _decimal(number: Fraction) -> Number:
    before, behind = _digits(number)
    return exact(f"{before}.{behind}") if behind else int(before)


def _stricter(
    first: Number | None, is_first_open: bool, second: Number | None, is_second_open: bool, sign: int
) -> tuple[Number | None, bool]:
    if first is None or second is None:
        return (second, is_second_open) if first is None else (first, is_first_open)
    if first == second:
        return first, is_first_open or is_second_open
    is_first = first > second if sign > 0 else first < second
    return (first, is_first_open) if is_first else (second, is_second_open)


def _common_multiple(first: Fraction, second: Fraction) -> Fraction:
    return Fraction(
        math.lcm(first.numerator * second.denominator, second.numerator * first.denominator),
        first.denominator * second.denominator,
    )


def _digits(number: Number | Fraction) -> tuple[str, str]:
    """Digits of the absolute value before the point and behind it, there without zeros at the end."""
    value = abs(Fraction(number))
    behind = 0
    while (value * 10**behind).denominator != 1:
        behind += 1
    digits = str(int(value * 10**behind)).rjust(behind + 1, "0")
    return digits[: len(digits) - behind], digits[len(digits) - behind :]


def _of_value(number: Fraction, is_integer: bool) -> str:
    before, behind = _digits(number)
    sign = "-" if number < 0 else "-?" if number == 0 else ""
    if behind:
        return rf"{sign}{before}\.{behind}0*"
    return f"{sign}{before}" if is_integer else f"{sign}{before}{_ZEROS}"


def _either(patterns: Iterator[str] | list[str]) -> str:
    return "(?:" + "|".join(patterns) + ")"


def _at_least(bound: Number, is_open: bool) -> str:
    if bound > 0 or (bound == 0 and is_open):
        return _above(bound, is_open)
    below = f"-0{_ZEROS}" if bound == 0 else f"-{_below(bound, is_open)}"
    return _either([f"{_INTEGER}{_ANY_FRACTION}", below])


def _at_most(bound: Number, is_open: bool) -> str:
    if bound < 0 or (bound == 0 and is_open):
        return f"-{_above(bound, is_open)}"
    above = f"0{_ZEROS}" if bound == 0 else _below(bound, is_open)
    return _either([f"-{_INTEGER}{_ANY_FRACTION}", above])


def _above(bound: Number, is_open: bool) -> str:
    """Texts of numbers from the absolute value of a bound on."""
    before, behind = _digits(bound)
    larger = f"{_either(_larger(before))}{_ANY_FRACTION}"
    if not behind:
        return _either([larger, before + (r"\.[0-9]*[1-9][0-9]*" if is_open else _ANY_FRACTION)])
    tail = [
        rf"{behind[:index]}[{int(digit) + 1}-9][0-9]*" for index, digit in enumerate(behind) if digit != "9"
    ]
    tail.append(behind + ("[0-9]*[1-9][0-9]*" if is_open else "[0-9]*"))
    return _either([larger, rf"{before}\.{_either(tail)}"])


def _below(bound: Number, is_open: bool) -> str:
    """Texts of numbers from 0 to the absolute value of a bound other than 0."""
    before, behind = _digits(bound)
    texts = [f"{_either(smaller)}{_ANY_FRACTION}"] if (smaller := list(_smaller(before))) else []
    if not behind:
        return _either([*texts, *([] if is_open else [before + _ZEROS])])
    tail = []
    for index, digit in enumerate(behind):
        if digit != "0":
            tail.append(rf"{behind[:index]}[0-{int(digit) - 1}][0-9]*")
        if index:
            tail.append(behind[:index])
    if not is_open:
        tail.append(f"{behind}0*")
    return _either([*texts, rf"{before}(?:\.{_either(tail)})?"])


def _larger(digits: str) -> Iterator[str]:
    """Integers above one."""
    yield f"[1-9][0-9]{{{len(digits)},}}"
    for index, digit in enumerate(digits):
        if digit != "9":
            yield f"{digits[:index]}[{int(digit) + 1}-9][0-9]{{{len(digits) - index - 1}}}"


def _smaller(digits: str) -> Iterator[str]:
    """Integers from 0 that are below one."""
    if len(digits) > 1:
        yield "0"
        yield f"[1-9][0-9]{{0,{len(digits) - 2}}}"
    for index, digit in enumerate(digits):
        lowest = 1 if index == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            yield f"{digits[:index]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - index - 1}}}"


def _multiples(step: Fraction, is_integer: bool) -> str:
    """Texts of the multiples of a number, by their last digits."""
    behind = len(_digits(step)[1])
    scaled = int(step * 10**behind)  # of which numbers are multiples when the point is moved
    num_digits = 0
    while 10**num_digits % scaled:
        num_digits += 1
        if num_digits > MAX_DIGITS:
            raise UnsupportedNumbers(f"multiples of {_shown(step)} are known by all their digits")
    if 10**num_digits // scaled > MAX_ENDINGS:
        raise UnsupportedNumbers(f"multiples of {_shown(step)} have more than {MAX_ENDINGS} endings")
    endings = [str(one).rjust(num_digits, "0") for one in range(0, 10**num_digits, scaled)]
    if num_digits == 0 and is_integer:
        return f"-?{_INTEGER}"
    if num_digits <= behind:
        free = behind - num_digits
        tail = [f"[0-9]{{{free}}}{_either(nonzero)}0*"] if (nonzero := _nonzero(endings)) else []
        tail += [f"[0-9]{{1,{free}}}0*"] if free else []
        return rf"-?{_INTEGER}(?:\.{_either([*tail, '0+'])})?"
    by_fraction: dict[str, list[str]] = {}
    for ending in endings:
        cut = num_digits - behind
        by_fraction.setdefault(ending[cut:].rstrip("0"), []).append(ending[:cut])
    texts = []
    for fraction, lasts in by_fraction.items():
        zeros = "" if is_integer else _ZEROS
        suffix = rf"\.{fraction}0*" if fraction else zeros
        texts.append(f"(?:[1-9][0-9]*{_either(lasts)}|{_either([str(int(last)) for last in lasts])}){suffix}")
    return f"-?{_either(texts)}"


def _nonzero(endings: list[str]) -> list[str]:
    return [stripped for ending in endings if (stripped := ending.rstrip("0"))]


def _shown(number: Fraction) -> str:
    before, behind = _digits(number)
    text = f"{before}.{behind}" if behind else before
    return text if len(text) <= 40 else text[:40] + "..."
