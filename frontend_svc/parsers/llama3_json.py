"""Tool calls of Llama 3: JSON objects, bare or after a tag; several are separated by semicolons."""

from __future__ import annotations

from frontend_svc.parsers.call_object import read_call
from frontend_svc.parsers.grammar_parser import ToolGrammar
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter

_TAG = "<|python_tag|>"
_STARTS = Markers("{", _TAG)
# An object is a call only if it has no keys other than those of a call and these.
_OTHER_KEYS = frozenset({"type", "id"})


def _parse(reader: Reader, calls: CallWriter) -> Waits[None]:
    is_behind_call = False
    while True:
        if is_behind_call:
            calls.begin()
            is_behind_call = yield from _read_separator(reader)
            if not is_behind_call:
                calls.abandon()
                continue
        elif (yield from read_until(reader, _STARTS, calls.content)) is None:
            return
        else:
            calls.begin()
        is_behind_call = yield from _read_call(reader, calls)


def _read_separator(reader: Reader) -> Waits[bool]:
    yield from skip_space(reader)
    if not (yield from read_one_of(reader, ";")):
        return False
    yield from skip_space(reader)
    return True


def _read_call(reader: Reader, calls: CallWriter) -> Waits[bool]:
    is_call = True
    if (yield from reader.peek()) == "<":
        is_call = bool((yield from read_one_of(reader, (_TAG,))))
        yield from skip_space(reader)
    if is_call and (yield from read_call(reader, calls, other_keys=_OTHER_KEYS, needs_arguments=True)):
        calls.commit()
        return True
    calls.abandon()
    return False


LLAMA3_JSON = ToolGrammar(
    name="llama3_json",
    grammar=_parse,
    markers=frozenset({_TAG}),
    named_prefix='{"name": "{name}", "parameters": ',
    any_prefix='{"name": "',
)
