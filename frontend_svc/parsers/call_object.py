"""Parses a tool call that is a JSON object with a name and arguments. Knows no markers around it."""

from __future__ import annotations

import re

from frontend_svc.parsers.json_scanner import read_json
from frontend_svc.parsers.reader import Reader, Waits, read_one_of, read_run, skip_space
from frontend_svc.parsers.writer import CallWriter

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# Keys and names are short and have no escapes, so that any other object is soon rejected as a call.
_PLAIN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_MAX_STRING_CHARS = 256


def read_call(
    reader: Reader, calls: CallWriter, *, other_keys: frozenset[str] | None, needs_arguments: bool
) -> Waits[bool]:
    """Take `{"name": ..., "arguments": {...}}` in any order; True if it is a complete call.

    "parameters" is accepted for "arguments". Further keys are ignored if they are in `other_keys`, or if
    that is None. Neither commits nor abandons the call.
    """
    if not (yield from read_one_of(reader, "{")):
        return False
    seen: set[str] = set()
    while True:
        yield from skip_space(reader)
        key = yield from _read_string(reader)
        if key is None:
            return False
        key = "arguments" if key in _ARGUMENT_KEYS else key
        is_known = key in ("name", "arguments") or other_keys is None or key in other_keys
        if not is_known or key in seen:
            return False
        seen.add(key)
        yield from skip_space(reader)
        if not (yield from read_one_of(reader, ":")):
            return False
        yield from skip_space(reader)
        if not (yield from _read_member(reader, calls, key)):
            return False
        yield from skip_space(reader)
        ending = yield from read_one_of(reader, ",}")
        if ending == "}":
            return "name" in seen and ("arguments" in seen or not needs_arguments)
        if not ending:
            return False


def read_arguments(reader: Reader, calls: CallWriter) -> Waits[bool]:
    """Take the JSON object of a call's arguments, and emit it as it arrives."""
    if (yield from reader.peek()) != "{":
        return False
    return (yield from read_json(reader, calls.arguments))


def _read_member(reader: Reader, calls: CallWriter, key: str) -> Waits[bool]:
    if key == "arguments":
        return (yield from read_arguments(reader, calls))
    if key == "name":
        name = yield from _read_string(reader)
        return name is not None and calls.name(name)
    return (yield from read_json(reader, lambda text: None))


def _read_string(reader: Reader) -> Waits[str | None]:
    if not (yield from read_one_of(reader, '"')):
        return None
    text = yield from read_run(reader, _PLAIN_STRING, _MAX_STRING_CHARS)
    return text if (yield from read_one_of(reader, '"')) else None
