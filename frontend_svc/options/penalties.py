"""Penalties: tokens that were used already become less likely, or more."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from triptych.engine.v1 import add_pb2


class Penalties(RequestOption):
    fields = ("sampling.presence_penalty", "sampling.frequency_penalty", "sampling.repetition_penalty")

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        chosen, sampling = prompt.model.defaults.chosen, request.sampling
        entry.sampling.presence_penalty = chosen(sampling, "presence_penalty", 0.0)
        entry.sampling.frequency_penalty = chosen(sampling, "frequency_penalty", 0.0)
        entry.sampling.repetition_penalty = chosen(sampling, "repetition_penalty", 1.0)
