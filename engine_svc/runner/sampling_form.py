"""Sampling parameters as text, for a request that is told of once. Knows no plan and no tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine_svc.sampling_params import RepetitionLimits, SamplingParams, ThinkingBudget


def sampling_text(sampling: SamplingParams) -> str:
    """What differs from the defaults, as JSON."""
    told, defaults = asdict(sampling), asdict(SamplingParams(sampling.max_tokens))
    changed = {name: value for name, value in told.items() if value != defaults[name]}
    return json.dumps({"max_tokens": sampling.max_tokens, **changed}, separators=(",", ":"), default=sorted)


def sampling_from(text: str) -> SamplingParams:
    """The parameters that `sampling_text` was given."""
    told: dict[str, Any] = json.loads(text)
    for name in told.keys() & _FORMS.keys():
        told[name] = _FORMS[name](told[name])
    return SamplingParams(**told)


# JSON knows lists alone. None is the default of each that may be None, so it is never told.
_FORMS: dict[str, Callable[[Any], object]] = {
    "stop_token_ids": frozenset,
    "allowed_token_ids": frozenset,
    "logit_bias": lambda pairs: tuple((token_id, bias) for token_id, bias in pairs),
    "bad_words": lambda words: tuple(tuple(word) for word in words),
    "logprob_token_ids": tuple,
    "repetition": lambda limits: RepetitionLimits(**limits),
    "thinking": lambda budget: ThinkingBudget(
        budget["num_tokens"], tuple(budget["start_token_ids"]), tuple(budget["end_token_ids"])
    ),
}
