"""Parses tool calls that are written as JSON, whole or in their arguments. Knows no markers around them.

A value that is no call is content to its end: nothing inside of it is a call.
"""

from __future__ import annotations

import json
import re

from frontend_svc.parsers.json_scanner import JsonScanner, read_json, read_scanned
from frontend_svc.parsers.reader import SPACE, Reader, Waits, read_one_of, read_run, skip_space
from frontend_svc.parsers.writer import CallWriter

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CALL_KEYS = frozenset({"name", "arguments"})
# Keys under which OpenAI's API wraps a call, or several in an array.
_CALL, _CALLS = "function", "tool_calls"
_SHELL_KEYS = frozenset({_CALL, _CALLS})
# Keys and names are short and have no escapes, so that any other object is soon rejected as a call.
_PLAIN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_MAX_STRING_CHARS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_calls(reader: Reader, calls: CallWriter, *, other_keys: frozenset[str] | None) -> Waits[None]:
    """Take one JSON value: a call, an array of calls, or a call or an array in an object of OpenAI's API.

    A call is `{"name": ..., "arguments": {...}}` in any order, see `read_arguments`. "parameters" is accepted
    for "arguments". Further keys are ignored if they are in `other_keys`, or if that is None. What follows
    the last whole call is content, unless it only closes the brackets around it.
    """
    yield from _read_value(reader, calls, _read_spelling(reader, calls, other_keys))


def read_arguments(reader: Reader, calls: CallWriter, name: str) -> Waits[bool]:
    """Take the arguments of a call of `name`; False if it is none.

    They are a JSON object, which is emitted as it arrives, a JSON string that holds one, or for none null, ""
    or the end of the text, where the model ended it.
    """
    is_known = calls.name(name)
    is_call = yield from _read_value(reader, calls, _read_known(reader, calls, is_known=is_known))
    if is_call:
        calls.commit()
    return is_call


def _read_value(reader: Reader, calls: CallWriter, grammar: Waits[bool]) -> Waits[bool]:
    """Take a JSON value by `grammar`; if it does not fit, the value is content to its end."""
    scanner = JsonScanner()
    reader.on_take = lambda text: scanner.scan(text, 0)
    is_taken = yield from grammar
    reader.on_take = None
    if not is_taken:
        calls.abandon()
        if scanner.is_inside:
            yield from read_scanned(reader, scanner, calls.content)
    return is_taken


def _read_spelling(reader: Reader, calls: CallWriter, other_keys: frozenset[str] | None) -> Waits[bool]:
    if (yield from reader.peek()) == "[":
        return (yield from _read_array(reader, calls, other_keys))
    return (yield from _read_object(reader, calls, other_keys, shells=_SHELL_KEYS))


def _read_array(reader: Reader, calls: CallWriter, other_keys: frozenset[str] | None) -> Waits[bool]:
    yield from read_one_of(reader, "[")
    ending = ","
    while ending == ",":
        yield from skip_space(reader)
        if not (yield from _read_object(reader, calls, other_keys, shells=frozenset({_CALL}))):
            return False
        yield from skip_space(reader)
        ending = yield from read_one_of(reader, ",]")
    if ending:
        calls.drop_record()
    return bool(ending)


def _read_object(
    reader: Reader, calls: CallWriter, other_keys: frozenset[str] | None, *, shells: frozenset[str]
) -> Waits[bool]:
    """Take an object that is a call or, under a key of `shells`, holds what is one; commits the calls."""
    seen: set[str] = set()
    if not (yield from _read_members(reader, calls, other_keys, shells, seen)):
        return False
    if _CALLS in seen:
        calls.drop_record()
    else:
        calls.commit()
    calls.begin()
    return True


def _read_members(
    reader: Reader,
    calls: CallWriter,
    other_keys: frozenset[str] | None,
    shells: frozenset[str],
    seen: set[str],
) -> Waits[bool]:
    """Take an object up to its end, and add the keys that matter to `seen`; False if it is no call."""
    ending = yield from read_one_of(reader, "{")
    while ending in ("{", ","):
        yield from skip_space(reader)
        key = yield from _read_string(reader)
        if key is None:
            return False
        key = "arguments" if key in _ARGUMENT_KEYS else key
        yield from skip_space(reader)
        if not (yield from read_one_of(reader, ":")):
            return False
        yield from skip_space(reader)
        is_shell = key in shells and (yield from reader.peek()) == ("[" if key == _CALLS else "{")
        keys = _CALL_KEYS if is_shell else {key}
        if not keys.isdisjoint(seen):
            return False
        seen |= keys
        if is_shell:
            seen.add(key)
            if key == _CALLS:
                fits = yield from _read_array(reader, calls, other_keys)
                calls.begin()
            else:
                fits = yield from _read_members(reader, calls, other_keys, frozenset(), set())
        elif key in _CALL_KEYS or (key != _CALLS and (other_keys is None or key in other_keys)):
            fits = yield from _read_member(reader, calls, key)
        else:
            fits = False
        if not fits:
            return False
        yield from skip_space(reader)
        ending = yield from read_one_of(reader, ",}")
    return bool(ending) and "name" in seen


def _read_member(reader: Reader, calls: CallWriter, key: str) -> Waits[bool]:
    if key == "arguments":
        return (yield from _read_arguments(reader, calls))
    if key == "name":
        name = yield from _read_string(reader)
        return name is not None and calls.name(name)
    return (yield from read_json(reader, lambda text: None))


def _read_known(reader: Reader, calls: CallWriter, *, is_known: bool) -> Waits[bool]:
    return (yield from _read_arguments(reader, calls)) and is_known


def _read_arguments(reader: Reader, calls: CallWriter) -> Waits[bool]:
    first = yield from reader.peek()
    if not first:
        return not reader.is_cut
    if first == "{":
        return (yield from read_json(reader, calls.arguments))
    parts: list[str] = []
    if first not in ('"', "n") or not (yield from read_json(reader, parts.append)):
        return False
    held = json.loads("".join(parts))
    text = held.strip(SPACE) if held else ""
    if not text:
        return not held
    scanner = JsonScanner()
    if not text.startswith("{") or scanner.scan(text, 0) < len(text) or not scanner.is_whole:
        return False
    # A lone surrogate is no text that can be sent.
    calls.whole_arguments(_SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text))
    return True


def _read_string(reader: Reader) -> Waits[str | None]:
    if not (yield from read_one_of(reader, '"')):
        return None
    text = yield from read_run(reader, _PLAIN_STRING, _MAX_STRING_CHARS)
    return text if (yield from read_one_of(reader, '"')) else None
