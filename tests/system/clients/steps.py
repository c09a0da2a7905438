"""The steps of a scenario: each is a function whose docstring is its line in docs/clients.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Literal

MODEL = "triptych-tiny"
PROMPT = "Where is the tower?"
STORY = "Tell me a story about a fox and a bell."
LONG = 400  # Tokens enough for each schema and call here.


def find_tower(city: Literal["Paris", "Pisa"]) -> str:
    """Find a tower by its city.

    Args:
        city: The city of the tower.
    """
    assert city in ("Paris", "Pisa")
    return f"There is one in {city}."


def run(*steps: Callable[[str], None]) -> None:
    """Run steps with the base address of the command line, and print their docstrings."""
    (base,) = sys.argv[1:]
    for step in steps:
        step(base)
    # On a line of its own: some clients leave an unfinished one.
    print()
    print(json.dumps([step.__doc__ for step in steps]))
