"""Sampling parameters whose meaning is the engine's alone: the rules of the contract name them."""

from __future__ import annotations

from frontend_svc.options.option import AnyRequest, PreparedPrompt, RequestOption
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.rules import passed_on_fields

_NAMES = passed_on_fields(sampling_pb2.SamplingParams)


class PassedOn(RequestOption):
    """An engine that does not serve one of them refuses it by name."""

    fields = tuple(f"sampling.{name}" for name in _NAMES)

    async def prepare(self, request: AnyRequest, prompt: PreparedPrompt, entry: add_pb2.AddEntry) -> None:
        requested = request.sampling
        for name in _NAMES:
            if requested.HasField(name):
                setattr(entry.sampling, name, getattr(requested, name))
