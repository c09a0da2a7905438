"""Flags of the metrics of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    kv_cache_metrics: bool = option(False, help="measure how long KV blocks stay in the prefix cache")
