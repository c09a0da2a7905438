"""Imports the halves of features: those of the house, then those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine_svc.config import EngineConfig
from engine_svc.core.control import Collective
from engine_svc.core.extras import Extra, Parameters
from engine_svc.features import packages
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature

if TYPE_CHECKING:
    from engine_svc.convert.feature import WireFeatures
    from engine_svc.runner.feature import RunnerContext, RunnerFeature


def wire_features(config: EngineConfig) -> WireFeatures:
    # Imported here: a rank, and a machine that only runs models, has no gRPC.
    from engine_svc.convert.feature import ParametersOfAdd, WireFeatures, stage_parameters

    parameters = stage_parameters()
    last = [ParametersOfAdd(parameters)] if parameters else []
    return WireFeatures([*_make("wire", config), *last])


def scheduler_features(config: EngineConfig, context: SchedulerContext) -> Sequence[SchedulerFeature]:
    options_of = {
        name: options(config) for name, options in _functions("scheduler", "replay_options").items()
    }
    replayed = {name: options for name, options in options_of.items() if options is not None}
    return _make("scheduler", config, replace(context, replayed=replayed))


def replayed_features(options: Mapping[str, Mapping[str, int]]) -> Sequence[SchedulerFeature]:
    """What decides with the scheduler in a replay.  options: see SchedulerContext."""
    make = _functions("scheduler", "replayed")
    return [make[name](options[name]) for name in options]


def runner_features(
    config: EngineConfig, context: RunnerContext, *, samples: bool = True
) -> Sequence[RunnerFeature]:
    """samples: False for a rank that chooses no tokens."""
    made: list[RunnerFeature] = _make("runner", config, context)
    return [feature for feature in made if samples or feature.prepares is None or feature.every_stage]


def reserved_bytes(config: EngineConfig) -> int:
    """The memory of a rank's device that features will take once there are requests."""
    return sum(reserved(config) for reserved in _functions("options", "reserved_bytes").values())


def collectives(config: EngineConfig) -> list[Collective]:
    """Names and parameters of the functions that features have in every rank: see RunnerFeature."""
    declared = _functions("options", "collectives").values()
    return [collective for declare in declared for collective in declare(config)]


def extra_types() -> list[type[Extra]]:
    """The types that ranks know. Every process of an engine has them in the same order."""
    return [Parameters, *(kind for module in _modules("extras") for kind in module.EXTRAS)]


def _make(half: str, *arguments: object) -> list[Any]:
    """The halves of this name of all enabled features; `make` returns None for a disabled one."""
    made = [module.make(*arguments) for module in _modules(half)]
    return [feature for feature in made if feature is not None]


def _functions(half: str, name: str) -> dict[str, Callable[..., Any]]:
    """The function of this name in the halves of features that have one, by the names of the features."""
    modules = {module.__name__.split(".")[-2]: vars(module) for module in _modules(half)}
    return {feature: members[name] for feature, members in modules.items() if name in members}


def _modules(name: str) -> list[Any]:
    """The modules of this name of all features."""
    names = [f"{package}.{name}" for package in packages()]
    return [import_module(module) for module in names if find_spec(module) is not None]
