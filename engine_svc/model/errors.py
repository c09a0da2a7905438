"""Reasons to reject a checkpoint, with messages for the person who chose it."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NAMES_SHOWN = 8


class ModelError(ValueError):
    """The folder cannot be served; the message gives the reason and the remedy."""


class CheckpointError(ModelError):
    """The folder's files are missing, broken or of an unsupported kind."""


class UnsupportedModel(ModelError):
    """The files are fine, but this kind of model would not run, or would run wrongly."""


def listed(names: Iterable[str]) -> str:
    """The first few of the names, sorted, and the number of further ones."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_MAX_NAMES_SHOWN])
    more = len(ordered) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
