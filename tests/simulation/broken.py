"""How a check says that an invariant does not hold. Not `assert`: checks also count under `python -O`."""

from __future__ import annotations


class BrokenInvariant(Exception):
    """An invariant that does not hold, by its name in the list of invariants."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


def expect(holds: bool, name: str, detail: str) -> None:
    """Raise unless `holds`. For rare checks: the detail is made beforehand."""
    if not holds:
        raise BrokenInvariant(name, detail)
