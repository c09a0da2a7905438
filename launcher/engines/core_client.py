"""What clients of an engine's core have in common: the shape of outputs, and what a dead engine raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frontend_svc.output.processor import StepColumns
from service_kit.errors import ServiceError, Unavailable


class EngineDead(Unavailable):
    """The engine behind this client has ended, for good. Every call after that raises it at once."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is dead: {why}", reason="ENGINE_DEAD")


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """What an engine yields at once: rows of one step, and requests that it refused, by handle."""

    columns: StepColumns
    rejected: Mapping[int, ServiceError] = field(default_factory=dict)


def no_rows() -> StepColumns:
    """Columns without a row."""
    return StepColumns((), (), [], {}, {})
