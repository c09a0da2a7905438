"""Reads the penalties of an ADD."""

from __future__ import annotations

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed, WireFeature
from engine_svc.features.penalties.extras import Penalties
from triptych.engine.v1 import add_pb2
from triptych_kit.field_checks import check

_NONE = Penalties()


def make(config: EngineConfig) -> WireFeature:
    return PenaltiesOfAdd()


class PenaltiesOfAdd(WireFeature):
    fields = ("sampling.presence_penalty", "sampling.frequency_penalty", "sampling.repetition_penalty")

    def parse(self, entry: add_pb2.AddEntry, context: AddContext) -> Parsed | None:
        sampling = entry.sampling
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        check(-2.0 <= presence <= 2.0, "presence_penalty", presence, "-2 to 2")
        check(-2.0 <= frequency <= 2.0, "frequency_penalty", frequency, "-2 to 2")
        # Outside this range, scaling a logit can overflow to inf or NaN.
        check(0.001 <= repetition <= 1000.0, "repetition_penalty", repetition, "0.001 to 1000")
        penalties = Penalties(presence, frequency, repetition)
        return None if penalties == _NONE else Parsed(penalties)
