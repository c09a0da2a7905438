"""What a checkpoint can be refused for, in words for the person who chose it."""

from __future__ import annotations


class ModelError(ValueError):
    """The folder cannot be served; the message says why and what to do."""


class CheckpointError(ModelError):
    """The folder's files are missing, broken or of a kind that is not read."""


class UnsupportedModel(ModelError):
    """The files are fine, but this kind of model would not run, or would run wrongly."""
