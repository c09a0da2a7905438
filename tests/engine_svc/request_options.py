"""Options of requests as tests name them, and the features of an engine that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from engine_svc.config import EngineConfig
from engine_svc.core.extras import Extra, Extras
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.features import FEATURES
from engine_svc.runner.feature import RunnerContext, RunnerFeature
from triptych_kit.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from engine_svc.convert.feature import WireFeatures
    from engine_svc.scheduler.feature import SchedulerFeature

# In the order of application.
_ON_THE_DEVICE = ("prompt_embeds", "prompt_logprobs", "token_rules", "penalties", "thinking_budget")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_RULES = {"allowed_token_ids": "allowed", "logit_bias": "bias", "bad_words": "bad_words"}


def _extra(feature: str, name: str) -> type:
    """Imported when it is used: a tree without the feature runs the other tests."""
    kind: type = getattr(import_module(f"engine_svc.features.{feature}.extras"), name)
    return kind


def split_options(**options: object) -> tuple[SamplingParams, Extras]:
    """What the core and what features know of these options; greedy with much room unless they say more."""
    extras: list[Extra] = []
    penalties = {name.removesuffix("_penalty"): options.pop(name) for name in _PENALTIES if name in options}
    if penalties:
        extras.append(_extra("penalties", "Penalties")(**penalties))
    rules = {field: options.pop(name) for name, field in _RULES.items() if name in options}
    if rules:
        extras.append(_extra("token_rules", "TokenRules")(**rules))
    if "thinking" in options:
        extras.append(options.pop("thinking"))
    if "prompt_logprobs" in options:
        wanted = options.get("logprob_token_ids", ())
        spec = _extra("prompt_logprobs", "PromptLogprobSpec")
        extras.append(spec(options.pop("prompt_logprobs"), wanted))
    sampling = SamplingParams(**{"max_tokens": 99, "temperature": 0.0, **options})
    return sampling, {type(extra): extra for extra in extras}


def make_wire_features(*, enable_prompt_embeds: bool = False) -> WireFeatures:
    """The wire halves of all features."""
    from engine_svc.build.features import wire_features

    return wire_features(EngineConfig(model="none", enable_prompt_embeds=enable_prompt_embeds))


def make_scheduler_features() -> Sequence[SchedulerFeature]:
    """The scheduler halves of features that need no configuration."""
    from engine_svc.build.features import scheduler_features
    from engine_svc.cache.attention import FullAttention
    from engine_svc.cache.config import CacheConfig
    from engine_svc.scheduler.config import SchedulerConfig
    from engine_svc.scheduler.feature import SchedulerContext
    from triptych_kit.clock import FakeClock

    context = SchedulerContext(
        FakeClock(),
        lambda work: work(),
        SchedulerConfig(64),
        CacheConfig(10, (FullAttention(4),)),
        Metrics("engine"),
    )
    return scheduler_features(EngineConfig(model="none"), context)


def make_runner_features(context: RunnerContext, *, takes_embeds: bool = False) -> Sequence[RunnerFeature]:
    """The runner halves of all features, without what the stubs of the wire are needed for."""
    config = EngineConfig(model="none", enable_prompt_embeds=takes_embeds)
    halves = [
        import_module(f"engine_svc.features.{name}.runner") for name in _ON_THE_DEVICE if name in FEATURES
    ]
    return [feature for half in halves if (feature := half.make(config, context)) is not None]
