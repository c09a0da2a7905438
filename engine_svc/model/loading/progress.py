"""The callback that reports how far loading has got."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # phase, done, total
