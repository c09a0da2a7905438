"""Imports the halves of features: those of the house, then those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.extras import Extra
from engine_svc.features import FEATURES
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature

if TYPE_CHECKING:
    from engine_svc.runner.feature import RunnerContext, RunnerFeature

_ENTRY_POINTS = "triptych.features"


def wire_features(config: EngineConfig) -> WireFeatures:
    return WireFeatures(_make("wire", config))


def scheduler_features(config: EngineConfig, context: SchedulerContext) -> Sequence[SchedulerFeature]:
    return _make("scheduler", config, context)


def runner_features(config: EngineConfig, context: RunnerContext) -> Sequence[RunnerFeature]:
    return _make("runner", config, context)


def extra_types() -> list[type[Extra]]:
    """The types that ranks know. Every process of an engine has them in the same order."""
    return [kind for package in _packages() for kind in getattr(import_module(package), "EXTRAS", ())]


def _make(half: str, *arguments: object) -> list[Any]:
    """What each feature with this half makes; None: it is disabled."""
    found = []
    for package in _packages():
        name = f"{package}.{half}"
        if find_spec(name) is not None:
            feature = import_module(name).make(*arguments)
            if feature is not None:
                found.append(feature)
    return found


def _packages() -> list[str]:
    offered = sorted(entry_points(group=_ENTRY_POINTS), key=lambda entry: entry.name)
    return [f"engine_svc.features.{name}" for name in FEATURES] + [entry.value for entry in offered]
