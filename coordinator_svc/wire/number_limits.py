"""How large the numbers may be that others send: what is counted on from them must have room. Pure."""

from __future__ import annotations

from service_kit.errors import InvalidArgument
from triptych.coordinator.v1 import coordinator_pb2

MAX_NUMBER = 2**62
# Beyond any wave or generation that comes about by counting; far below where numbers end.
_COUNTED_MAX = 2**48
# More than a group gets on by in years.
_MAX_AHEAD = 2**40


def excess(value: int, limit: int = MAX_NUMBER) -> str:
    """What is wrong with a number, in words that follow its name; empty if nothing is."""
    return f"is {value}, the limit is {limit}" if value > limit else ""


def check_report(report: coordinator_pb2.EngineReport) -> None:
    """Raise InvalidArgument naming every number of a report that is too large."""
    numbers = {
        "seq": report.seq,
        "wave": report.wave,
        "generation": report.generation,
        "step_number": report.step_number,
        "load.step_number": report.load.step_number,
    }
    violations = [
        (f"report.{field}", f"{field} {excess(value)}") for field, value in numbers.items() if excess(value)
    ]
    if violations:
        raise InvalidArgument("; ".join(text for _, text in violations), violations=violations)


def check_hint(hint: coordinator_pb2.FirstRequestWhilePaused) -> None:
    """Raise InvalidArgument if the wave of a hint is too large."""
    if excess(hint.wave):
        raise InvalidArgument(f"wave {excess(hint.wave)}", field="first_request_while_paused.wave")


def check_ahead(field: str, value: int, known: int) -> None:
    """Raise InvalidArgument if a number that the others of a group count on from is far beyond `known`.

    So that one engine that says nonsense cannot take a group to where numbers end. A coordinator that has
    just started knows none, and takes what the one before could have taken from a single engine.
    """
    problem = excess(value, max(known, _COUNTED_MAX) + _MAX_AHEAD)
    if problem:
        raise InvalidArgument(f"{field.rpartition('.')[2]} {problem} in this group", field=field)
