"""Reads the penalties of an ADD."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.penalties.extras import Penalties
from triptych.engine.v1 import add_pb2

_NONE = Penalties()


def make(config: EngineConfig) -> WireFeature:
    return PenaltiesOfAdd()


class PenaltiesOfAdd(WireFeature):
    fields = ("sampling.presence_penalty", "sampling.frequency_penalty", "sampling.repetition_penalty")

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        sampling = entry.sampling
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        penalties = Penalties(presence, frequency, repetition)
        return None if penalties == _NONE else Parsed(penalties)
