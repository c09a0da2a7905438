"""Flags of the counts."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    count_nan_logits: bool = option(
        False, help="report how many logits of a row were not finite; every row then computes all logits"
    )
