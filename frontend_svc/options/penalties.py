"""Penalties: tokens that were used already become less likely, or more."""

from __future__ import annotations

import math

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption, check_set
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from triptych.engine.v1 import add_pb2

_MAX_PENALTY = 2.0
_LEAST_REPETITION, _MOST_REPETITION = 0.001, 1000.0
_WITHIN = f"must be in -{_MAX_PENALTY:g}..{_MAX_PENALTY:g}"


class Penalties(RequestOption):
    fields = ("sampling.presence_penalty", "sampling.frequency_penalty", "sampling.repetition_penalty")

    def check(self, request: AnyRequest, model: ServedModel, violations: Violations) -> None:
        sampling = request.sampling
        for name in ("presence_penalty", "frequency_penalty"):
            is_fine = abs(getattr(sampling, name)) <= _MAX_PENALTY
            check_set(sampling, name, is_fine, _WITHIN, violations)
        repetition = sampling.repetition_penalty
        is_fine = math.isfinite(repetition) and _LEAST_REPETITION <= repetition <= _MOST_REPETITION
        rule = f"must be in {_LEAST_REPETITION:g}..{_MOST_REPETITION:g}"
        check_set(sampling, "repetition_penalty", is_fine, rule, violations)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        chosen, sampling = prompt.model.defaults.chosen, request.sampling
        entry.sampling.presence_penalty = chosen(sampling, "presence_penalty", 0.0)
        entry.sampling.frequency_penalty = chosen(sampling, "frequency_penalty", 0.0)
        entry.sampling.repetition_penalty = chosen(sampling, "repetition_penalty", 1.0)
