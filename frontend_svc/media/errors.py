"""Why a medium is not served."""

from __future__ import annotations


class MediaRefused(ValueError):
    """A medium that cannot be read, or that a model does not take; has a message for the client."""


class SettingsError(ValueError):
    """A model's settings of its processor that cannot be read, or are not served; names the setting."""
