"""Tool calls of Mistral's models: a JSON array after a marker, or since 2025 a marker before each call."""

from __future__ import annotations

import re

from frontend_svc.parsers.call_object import read_arguments, read_call
from frontend_svc.parsers.grammar_parser import ToolGrammar
from frontend_svc.parsers.parser import new_short_call_id
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_run, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_STARTS = Markers(_CALLS)
_NAME = re.compile(r"[^\s\[\]{}\"]*")
_MAX_NAME_CHARS = 256


def _parse(reader: Reader, calls: CallWriter) -> Waits[None]:
    while (yield from read_until(reader, _STARTS, calls.content)) is not None:
        calls.begin()
        yield from read_one_of(reader, (_CALLS,))
        yield from skip_space(reader)
        char = yield from reader.peek()
        if char == "[":
            yield from _read_array(reader, calls)
        elif (yield from _read_named(reader, calls)):
            calls.commit()
        else:
            calls.abandon()


def _read_array(reader: Reader, calls: CallWriter) -> Waits[None]:
    yield from read_one_of(reader, "[")
    while True:
        yield from skip_space(reader)
        if not (yield from read_call(reader, calls, other_keys=None, needs_arguments=False)):
            calls.abandon()
            return
        calls.commit()
        calls.begin()
        yield from skip_space(reader)
        following = yield from read_one_of(reader, ",]")
        if following == "]":
            calls.drop_record()
            return
        if not following:
            calls.abandon()
            return


def _read_named(reader: Reader, calls: CallWriter) -> Waits[bool]:
    """Take `name[ARGS]{...}`; older models write `[CALL_ID]` and an id before `[ARGS]`, some no marker."""
    name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
    if not calls.name(name):
        return False
    yield from skip_space(reader)
    if (yield from reader.peek()) == "[":
        marker = yield from read_one_of(reader, (_ARGS, _CALL_ID))
        if marker == _CALL_ID:
            yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
            marker = yield from read_one_of(reader, (_ARGS,))
        if not marker:
            return False
        yield from skip_space(reader)
    return (yield from read_arguments(reader, calls))


MISTRAL = ToolGrammar(
    name="mistral",
    grammar=_parse,
    markers=frozenset({_CALLS, _ARGS, _CALL_ID}),
    named_prefix='[TOOL_CALLS] [{"name": "{name}", "arguments": ',
    any_prefix='[TOOL_CALLS] [{"name": "',
    new_id=new_short_call_id,
)
MISTRAL_ARGS = ToolGrammar(
    name="mistral_args",
    grammar=_parse,
    markers=frozenset({_CALLS, _ARGS, _CALL_ID}),
    named_prefix="[TOOL_CALLS]{name}[ARGS]",
    any_prefix="[TOOL_CALLS]",
    new_id=new_short_call_id,
)
