"""Flags of pins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option, require

POLICY = "continuum"  # that serves jobs
_MAX_TTL_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    pin_ttl_rule: str = option(
        "utility",
        choices=("utility", "lognormal", "fixed"),
        help="how long the blocks of a job stay while its tool runs: as long as the time saved is worth more "
        "than the blocks, --pin-ttl-s where the tool is expected to be fast, or --pin-ttl-s always",
    )
    pin_ttl_s: float = option(10.0, help="how long, in seconds, with lognormal or fixed")
    pin_threshold_s: float = option(
        2.0, help="with lognormal: no pin where the tool is expected to take longer, in seconds"
    )
    continuum_pressure: str = option(
        "preempt-first",
        choices=("preempt-first", "pins-first"),
        help="what gives way where blocks are short: running requests, and pins where no other could run; "
        "or pins",
    )
    max_pinned_share: float = option(
        0.5, help="share of the KV blocks that an operator may pin, from 0 to 1; pins of jobs are not limited"
    )
    max_tenant_pinned_share: float = option(
        0.25, help="the same of what an operator may pin for one tenant, within --max-pinned-share"
    )

    def check(self) -> None:
        for name in ("max_pinned_share", "max_tenant_pinned_share"):
            share = getattr(self, name)
            require(0 <= share <= 1, name, share, "0 to 1")
        for name in ("pin_ttl_s", "pin_threshold_s"):
            value = getattr(self, name)
            is_valid = math.isfinite(value) and 0 < value <= _MAX_TTL_S
            require(is_valid, name, value, f"above 0, at most {_MAX_TTL_S:g}")
