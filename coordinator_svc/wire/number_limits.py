"""Limits of received numbers, so that counting on from them cannot overflow. Pure."""

from __future__ import annotations

from triptych.coordinator.v1 import coordinator_pb2
from triptych_kit.errors import InvalidArgument

MAX_NUMBER = 2**62
# Above any wave or generation that counting can reach; far below overflow.
_COUNTED_MAX = 2**48
# More than a group advances in years.
_MAX_AHEAD = 2**40


def excess(value: int, limit: int = MAX_NUMBER) -> str:
    """The end of a message about a number above the limit, to follow its name; "" for one within it."""
    return f"is {value}, the limit is {limit}" if value > limit else ""


def check_report(report: coordinator_pb2.EngineReport) -> None:
    """Raise InvalidArgument that names every number of a report that is too large."""
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
    """Raise InvalidArgument if a number from which a group counts on is far beyond `known`.

    A single faulty engine must not drive a group's numbers to overflow. A coordinator that has just started
    knows no number; it accepts up to what one engine could have caused at the coordinator before.
    """
    problem = excess(value, max(known, _COUNTED_MAX) + _MAX_AHEAD)
    if problem:
        raise InvalidArgument(f"{field.rpartition('.')[2]} {problem} in this group", field=field)
