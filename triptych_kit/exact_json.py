"""JSON whose numbers keep all their digits: those with a fraction or an exponent are read as Decimal."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any


class LongNumber(float):
    """A number with more digits than a double holds, or beyond its range, among numbers that are floats."""

    text: str

    @classmethod
    def of(cls, text: str) -> float:
        """The number of a JSON text; a plain float where that is the same number."""
        value = float(text)
        if Decimal(repr(value)) == Decimal(text):
            return value
        number = cls(value)
        number.text = text
        return number


def loads(text: str | bytes) -> Any:
    """Raises ValueError as `json.loads` does."""
    return json.loads(text, parse_float=Decimal)


def dumps(value: Any, *, ensure_ascii: bool = True) -> str:
    """JSON of a value that may have Decimals and LongNumbers, however deeply it is nested."""
    written: list[str] = []
    # What is still to be written, the next one last: texts as they are, and values.
    rest: list[tuple[bool, Any]] = [(False, value)]
    while rest:
        is_text, part = rest.pop()
        if is_text:
            written.append(part)
        elif isinstance(part, Decimal):
            written.append(str(part))
        elif isinstance(part, LongNumber):
            written.append(part.text)
        elif isinstance(part, dict):
            rest.append((True, "}"))
            for index, (key, entry) in reversed([*enumerate(part.items())]):
                name = json.dumps(key, ensure_ascii=ensure_ascii)
                rest += [(False, entry), (True, f"{', ' if index else ''}{name}: ")]
            written.append("{")
        elif isinstance(part, list | tuple):
            rest.append((True, "]"))
            for index, entry in reversed([*enumerate(part)]):
                rest += [(False, entry), (True, ", " if index else "")]
            written.append("[")
        else:
            written.append(json.dumps(part, ensure_ascii=ensure_ascii))
    return "".join(written)
