"""The typed answer and the typed arguments, for clients that take models of pydantic."""

from __future__ import annotations

from typing import Literal

import pydantic


class Tower(pydantic.BaseModel, extra="forbid"):
    """The answer of a schema, closed: in an open one the tiny model adds members up to its limit."""

    city: Literal["Paris", "Pisa"]
    is_tall: bool


class Arguments(pydantic.BaseModel, extra="forbid"):
    """The arguments of the tool, closed as the answer is."""

    city: Literal["Paris", "Pisa"]
