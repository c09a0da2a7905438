"""Typed values of a model's settings in JSON, such as a preprocessor_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping

from frontend_svc.media.errors import SettingsError

_MAX_EDGE = 1 << 15


class Settings:
    """Settings by name. A missing one, or null, has its default; one of another type raises SettingsError."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SettingsError(f"{name} is {value!r}, must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise SettingsError(f"{name} is {value!r}, must be a text")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise SettingsError(f"{name} is {value!r}, must be a number")
        return float(value)

    def whole(self, name: str, default: int, *, minimum: int = 1, maximum: int = _MAX_EDGE) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise SettingsError(f"{name} is {value!r}, must be a whole number in {minimum}..{maximum}")
        return value

    def triple(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A number of each channel; one number is that of all."""
        value = self._values.get(name)
        if value is None:
            return default
        numbers = value if isinstance(value, list) else [value] * 3
        checked = [
            float(each) for each in numbers if isinstance(each, int | float) and not isinstance(each, bool)
        ]
        if len(checked) != 3 or len(numbers) != 3:
            raise SettingsError(f"{name} is {value!r}, must be 3 numbers")
        return tuple(checked)

    def section(self, name: str) -> Settings:
        """The settings below `name`; none where it is missing."""
        value = self._values.get(name)
        if value is None:
            return Settings({})
        if not isinstance(value, dict):
            raise SettingsError(f"{name} is {value!r}, must be an object")
        return Settings(value)

    def size(self, name: str, default: Mapping[str, int], *, is_square: bool = True) -> Settings:
        """A size by its edges. One number is that of both edges, or of the shortest unless it `is_square`."""
        value = self._values.get(name)
        if value is None:
            return Settings(default)
        if isinstance(value, dict):
            return Settings(value)
        if isinstance(value, list) and len(value) == 2:
            return Settings({"height": value[0], "width": value[1]})
        return Settings({"height": value, "width": value} if is_square else {"shortest_edge": value})

    def with_values(self, values: Mapping[str, object]) -> Settings:
        """These settings with others in place of some."""
        return Settings({**self._values, **values})
