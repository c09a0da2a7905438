"""The base of features' flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Options become bases of the engine's configuration, so that a feature sees all of them.
    from engine_svc.config import CoreConfig as _Base
else:
    _Base = object


class FeatureOptions(_Base):
    """Base of a frozen dataclass with a feature's own options; its fields are keyword-only."""

    def check(self) -> None:
        """Raise ConfigError for invalid options; those of the core and of other features are there too."""
