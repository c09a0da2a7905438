"""What clients of an engine's core have in common: the shape of outputs, and what a dead engine raises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from frontend_svc.output.processor import StepColumns
from service_kit.errors import ServiceError, Unavailable
from triptych.engine.v1 import add_pb2, engine_pb2


class EngineDead(Unavailable):
    """The engine behind this client has ended, for good. Every call after that raises it at once."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the engine is dead: {why}", reason="ENGINE_DEAD")


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """What an engine yields at once: rows of one step, and requests that it refused, by handle."""

    columns: StepColumns
    rejected: Mapping[int, ServiceError] = field(default_factory=dict)


class CoreClient(Protocol):
    """Requests into engines and their raw outputs, for a caller that blocks."""

    def add(self, entry: add_pb2.AddEntry) -> int:
        """Send a request, which becomes the client's; returns its handle. EngineDead where there is none."""
        ...

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """End requests in whichever engines have them; those that have ended are passed over."""
        ...

    def get_output(self) -> CoreOutput:
        """The next outputs, waiting for them. Raises what broke the engine, then EngineDead."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


def no_rows() -> StepColumns:
    """Columns without a row."""
    return StepColumns((), (), [], {}, {})
