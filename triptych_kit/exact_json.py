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
    """JSON of a value that may have Decimals and LongNumbers."""

    def written(part: Any) -> str:
        if isinstance(part, Decimal):
            return str(part)
        if isinstance(part, LongNumber):
            return part.text
        if isinstance(part, dict):
            members = (f"{written(key)}: {written(entry)}" for key, entry in part.items())
            return "{" + ", ".join(members) + "}"
        if isinstance(part, list | tuple):
            return "[" + ", ".join(map(written, part)) + "]"
        return json.dumps(part, ensure_ascii=ensure_ascii)

    return written(value)
