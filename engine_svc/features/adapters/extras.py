"""The adapter of a request, and the key of its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_svc.core.extras import Extra

BLOCKER = "adapter"  # of requests whose adapter is not in memory yet
_KEY_PREFIX = "adapter:"


@dataclass(frozen=True, slots=True)
class Pins:
    """The adapters that stay in memory once they are loaded, as a request came. version: of changes."""

    version: int = 0
    digests: tuple[str, ...] = ()

    def newest(self, other: Pins) -> Pins:
        """The newer of both."""
        return max(self, other, key=lambda pins: pins.version)


@dataclass(frozen=True, slots=True)
class AdapterUse(Extra):
    """folder: of its files, which must still have this digest when they are loaded."""

    name: str
    folder: str
    digest: str
    pins: Pins = Pins()

    @property
    def blocker(self) -> str:
        return BLOCKER

    @property
    def cache_key(self) -> str:
        """What the KV of its requests depends on besides tokens."""
        return cache_key_of(self.digest)


def cache_key_of(digest: str) -> str:
    """The key of blocks whose KV depends on the adapter."""
    return _KEY_PREFIX + digest


def adapter_of(extra_keys: Iterable[str]) -> str | None:
    """The key of an adapter among those of a request's blocks; None for the plain model."""
    return next((key for key in extra_keys if key.startswith(_KEY_PREFIX)), None)


EXTRAS = (AdapterUse,)
