"""The adapter of a request, and the key of its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_svc.core.extras import Extra

_KEY_PREFIX = "adapter:"


@dataclass(frozen=True, slots=True)
class AdapterUse(Extra):
    """folder: of its files, which must still have this digest when they are loaded.

    is_pinned: once loaded it stays in memory.
    """

    name: str
    folder: str
    digest: str
    is_pinned: bool = False

    @property
    def blocker(self) -> str:
        return "adapter"

    @property
    def cache_key(self) -> str:
        """What the KV of its requests depends on besides tokens."""
        return _KEY_PREFIX + self.digest


def adapter_of(extra_keys: Iterable[str]) -> str | None:
    """The key of an adapter among those of a request's blocks; None for the plain model."""
    return next((key for key in extra_keys if key.startswith(_KEY_PREFIX)), None)


EXTRAS = (AdapterUse,)
