"""Tool calls of DeepSeek V3, R1 and V3.1: special tokens around a name and its arguments."""

from __future__ import annotations

import re

from frontend_svc.parsers.call_object import read_arguments
from frontend_svc.parsers.grammar_parser import ToolGrammar
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_run, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_OUTSIDE = Markers(_CALLS_BEGIN, _CALL_BEGIN)
_INSIDE = Markers(_CALLS_BEGIN, _CALL_BEGIN, _CALLS_END)
_NAME = re.compile(r"[^\s<`{]*")
_MAX_NAME_CHARS = 256
_FENCE = "```"


def _parse(reader: Reader, calls: CallWriter) -> Waits[None]:
    is_inside = False
    while True:
        marker = yield from read_until(reader, _INSIDE if is_inside else _OUTSIDE, calls.content)
        if marker is None:
            return
        calls.begin()
        yield from read_one_of(reader, (marker,))
        if marker == _CALLS_END:
            calls.drop_record()
            calls.drop_space()
            is_inside = False
            continue
        if marker == _CALLS_BEGIN:
            yield from skip_space(reader)
            marker = yield from read_one_of(reader, (_CALL_BEGIN,))
        if marker and (yield from _read_call(reader, calls)):
            calls.commit()
            yield from _read_call_end(reader, calls)
            is_inside = True
        else:
            calls.abandon()


def _read_call(reader: Reader, calls: CallWriter) -> Waits[bool]:
    """Take `name<sep>{...}` (V3.1), or `function<sep>name` and the arguments in a code fence (V3)."""
    name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
    if not (yield from read_one_of(reader, (_SEPARATOR,))):
        return False
    yield from skip_space(reader)
    if (yield from reader.peek()) != "{":
        if name != "function":
            return False
        name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
        yield from skip_space(reader)
        if not (yield from read_one_of(reader, (_FENCE + "json",))):
            return False
        yield from skip_space(reader)
    return calls.name(name) and (yield from read_arguments(reader, calls))


def _read_call_end(reader: Reader, calls: CallWriter) -> Waits[None]:
    calls.begin()
    yield from skip_space(reader)
    if (yield from reader.peek()) == "`":
        if (yield from read_one_of(reader, (_FENCE,))):
            calls.begin()
        yield from skip_space(reader)
    if (yield from read_one_of(reader, (_CALL_END,))):
        calls.drop_record()
    else:
        calls.abandon()


_MARKERS = frozenset({_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR})
DEEPSEEK = ToolGrammar(
    name="deepseek",
    grammar=_parse,
    markers=_MARKERS,
    named_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}{{name}}\n{_FENCE}json\n",
    any_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}",
)
DEEPSEEK_V31 = ToolGrammar(
    name="deepseek_v31",
    grammar=_parse,
    markers=_MARKERS,
    named_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}{{name}}{_SEPARATOR}",
    any_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}",
)
