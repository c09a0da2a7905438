"""Flags of KV cache events."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option, require


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    enable_kv_events: bool = option(False, help="publish changes of the prefix cache to subscribers")

    def check(self) -> None:
        require(
            self.enable_prefix_caching or not self.enable_kv_events,
            "enable_kv_events",
            self.enable_kv_events,
            "off where --enable-prefix-caching is",
        )
