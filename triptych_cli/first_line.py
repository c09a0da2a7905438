"""The first line of a service on a terminal, written before the slow imports. Needs no other package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

_SERVICES = ("serve", "frontend", "engine", "coordinator")
_WITH_MODEL = ("serve", "engine")


def is_service(arguments: Sequence[str]) -> bool:
    """Whether the arguments of the command run services."""
    return bool(arguments) and arguments[0] in _SERVICES


def show_first_line(arguments: Sequence[str]) -> None:
    """Write what a service begins with, if stderr is a terminal; the next line of the log replaces it."""
    if not is_service(arguments) or sys.stderr is None or not sys.stderr.isatty():
        return
    verb, *options = arguments
    if "--help" in options or "-h" in options:
        return
    is_model_first = verb in _WITH_MODEL and bool(options) and not options[0].startswith("-")
    action = f"checking {options[0]}" if is_model_first else "starting"
    # The terminal may have been closed.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"triptych {verb}: {action} ...".encode(errors="replace").decode())
        sys.stderr.flush()
