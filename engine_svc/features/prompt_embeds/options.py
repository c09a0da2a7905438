"""Flags of prompt embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    enable_prompt_embeds: bool = option(False, help="accept prompt embeddings in place of tokens")
