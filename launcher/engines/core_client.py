"""Shared by clients of an engine's core: the output type, and the error of a dead engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frontend_svc.output.processor import StepColumns
from service_kit.errors import ServiceError, Unavailable


class EngineDead(Unavailable):
    """The engine of this client has ended for good. Every later call raises this at once."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is dead: {why}", reason="ENGINE_DEAD")


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """Output of one step: its rows, and refused requests by handle."""

    columns: StepColumns
    rejected: Mapping[int, ServiceError] = field(default_factory=dict)


def no_rows() -> StepColumns:
    return StepColumns((), (), [], {}, {})
