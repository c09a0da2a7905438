"""How many drafts each row may have in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_svc.core.request import Request


class DraftLimit(Protocol):
    """Decides how many drafts rows may have."""

    def begin_step(self, rows: Sequence[Request]) -> None:
        """Decide for the step's rows with one known token to compute."""

    def allowed(self, request: Request) -> int:
        """How many drafts the row may have in this step."""

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """num_drafts: how many were verified, none where nothing was proposed."""


class FixedLimit:
    """The same number in every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def begin_step(self, rows: Sequence[Request]) -> None: ...

    def allowed(self, request: Request) -> int:
        return self._num_drafts

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None: ...
