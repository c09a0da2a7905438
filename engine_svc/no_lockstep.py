"""The lockstep of an engine that shares its model with nobody."""

from __future__ import annotations


class NoLockstep:
    """Steps whenever there is something to compute, and stands still whenever it is told to."""

    needs_idle_step = False

    def wants_step(self, has_work: bool) -> bool:
        """Where there is something to compute."""
        return has_work

    def may_step(self, has_work: bool) -> bool:
        """Always."""
        return True

    def launched(self, *, is_idle: bool, has_work: bool) -> None:
        """Nobody else does."""

    def came_back(self) -> None:
        """Nobody has waited for it."""

    def lose(self, error: Exception) -> None:
        """It is nobody else's."""

    def check_still(self, *, or_apart: bool = False) -> None:
        """Nobody else would want a step."""

    def pause(self) -> None:
        """Nobody has to know."""

    def resume(self) -> None:
        """Nobody has waited."""
