"""Calls of an operator that reach the device: what they name, and how they fail. Knows no device."""

from __future__ import annotations

from enum import Enum


class WakeTag(Enum):
    """What can be woken separately; the value is its name on the wire. The runner has no SCHEDULING."""

    SCHEDULING = "scheduling"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Refused(ValueError):
    """The call cannot be done; the message gives the reason, and nothing has changed."""


class RanksDisagree(RuntimeError):
    """Some ranks succeeded and others failed: they no longer hold one model, so the engine ends."""


class WeightsLost(RuntimeError):
    """Neither new weights nor the old ones could be loaded: there are none until a wake or a reload."""
