"""The flag of forward outputs."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import ConfigError, option


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    max_forward_output_bytes: int = option(
        0, help="hidden states and routed experts that one output may ask for, in bytes; 0: none may"
    )

    def check(self) -> None:
        if self.max_forward_output_bytes < 0:
            raise ConfigError(
                f"--max-forward-output-bytes is {self.max_forward_output_bytes}, must be at least 0"
            )
