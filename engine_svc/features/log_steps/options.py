"""Flags of the log of steps."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    log_steps: bool = option(False, help="log each step: what it computed and how long it took")
