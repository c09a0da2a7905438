"""Flags of structured output."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option, require


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    enable_structured_output: bool = option(
        True,
        help="take requests with a grammar; the start then prepares the vocabulary, about a second for 128k "
        "tokens",
    )
    grammar_threads: int | None = option(
        None, help="CPU threads that compute masks of grammars (default: half of the CPUs, at most 8)"
    )
    max_cached_grammars: int = option(1024, help="most compiled grammars that are kept for later requests")
    grammar_cache_memory: int = option(
        32 << 20, size=True, help="most bytes of compiled grammars that are kept, as they are estimated"
    )

    def check(self) -> None:
        for name in ("max_cached_grammars", "grammar_cache_memory"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        threads = self.grammar_threads
        require(threads is None or 1 <= threads <= 64, "grammar_threads", threads, "1 to 64")
