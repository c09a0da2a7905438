"""Tool calls of Mistral's models: a JSON array after a marker, or since 2025 a marker before each call."""

from __future__ import annotations

import re

from frontend_svc.parsers.call_object import read_arguments, read_calls
from frontend_svc.parsers.grammar_parser import ToolGrammar, calls_behind
from frontend_svc.parsers.parser import CallForm, new_short_call_id
from frontend_svc.parsers.reader import Reader, Waits, read_one_of, read_run, skip_space
from frontend_svc.parsers.writer import CallWriter

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\s\[\]{}\"]*")
_MAX_NAME_CHARS = 256


def _read(reader: Reader, calls: CallWriter, marker: str) -> Waits[None]:
    yield from skip_space(reader)
    if (yield from reader.peek()) in ("[", "{"):
        yield from read_calls(reader, calls, other_keys=None)
        return
    name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
    if (yield from _read_markers(reader)):
        yield from read_arguments(reader, calls, name)
    else:
        calls.abandon()


def _read_markers(reader: Reader) -> Waits[bool]:
    """Take `[ARGS]`, in older models behind `[CALL_ID]` and an id; some write an object without a marker."""
    yield from skip_space(reader)
    if (yield from reader.peek()) == "{":
        return True
    marker = yield from read_one_of(reader, (_ARGS, _CALL_ID))
    if marker == _CALL_ID:
        yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
        marker = yield from read_one_of(reader, (_ARGS,))
    yield from skip_space(reader)
    return bool(marker)


_GRAMMAR = calls_behind((_CALLS,), _read)
MISTRAL = ToolGrammar(
    name="mistral",
    grammar=_GRAMMAR,
    markers=frozenset({_CALLS, _ARGS, _CALL_ID}),
    named_prefix='[TOOL_CALLS] [{"name": "{name}", "arguments": ',
    any_prefix='[TOOL_CALLS] [{"name": "',
    form=CallForm(_CALLS, "}]"),
    new_id=new_short_call_id,
)
MISTRAL_ARGS = ToolGrammar(
    name="mistral_args",
    grammar=_GRAMMAR,
    markers=frozenset({_CALLS, _ARGS, _CALL_ID}),
    named_prefix="[TOOL_CALLS]{name}[ARGS]",
    any_prefix="[TOOL_CALLS]",
    form=CallForm(_CALLS, ""),
    new_id=new_short_call_id,
)
