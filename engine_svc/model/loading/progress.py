"""How far loading is, told while it gets on. Knows nobody who listens."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # phase, done, total
