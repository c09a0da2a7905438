"""Flags of images and sound in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine_svc.core.encoder_spec import read_encoder_spec
from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option, require


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    max_num_encoder_input_tokens: int | None = option(
        None, help="most embeddings that the encoder computes in a step (default: --max-num-batched-tokens)"
    )
    encoder_cache_tokens: int | None = option(
        None, help="most embeddings that are kept for later requests (default: as many as in a step)"
    )
    disable_chunked_mm_input: bool = option(
        False, help="compute all positions of an image in one step, where they do not begin one"
    )
    media_cache_mb: int = option(
        256, help="MiB of encoder inputs that are kept, so that a known image is not sent again"
    )

    @property
    def max_encoder_outputs(self) -> int:
        """Most embeddings in a step."""
        return self.max_num_encoder_input_tokens or self.max_num_batched_tokens

    @property
    def max_kept_outputs(self) -> int:
        return self.encoder_cache_tokens or self.max_encoder_outputs

    def check(self) -> None:
        """Raise ConfigError for invalid options."""
        for name in ("max_num_encoder_input_tokens", "encoder_cache_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
            # Else a prompt with more embeddings than this would wait forever, and others behind it.
            require(
                value is None or self.enable_chunked_prefill or value >= self.max_num_batched_tokens,
                name,
                value,
                f"at least the {self.max_num_batched_tokens} tokens of a step without chunked prefill",
            )
        require(self.media_cache_mb >= 0, "media_cache_mb", self.media_cache_mb, "at least 0")
        spec = read_encoder_spec(Path(self.model)) if self.disable_chunked_mm_input else None
        if spec is not None:
            require(
                self.max_num_batched_tokens >= spec.num_outputs,
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least the {spec.num_outputs} positions of an image with --disable-chunked-mm-input",
            )
