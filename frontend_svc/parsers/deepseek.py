"""Tool calls of DeepSeek V3, R1 and V3.1: special tokens around a name and its arguments."""

from __future__ import annotations

import re

from frontend_svc.parsers.call_object import read_arguments
from frontend_svc.parsers.grammar_parser import ToolGrammar, calls_behind
from frontend_svc.parsers.parser import CallForm
from frontend_svc.parsers.reader import Reader, Waits, read_one_of, read_run, skip_space
from frontend_svc.parsers.writer import CallWriter

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[^\s<`{]*")
_MAX_NAME_CHARS = 256
_FENCE = "```"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Waits[None]:
    if marker == _CALLS_BEGIN:
        yield from skip_space(reader)
        marker = yield from read_one_of(reader, (_CALL_BEGIN,))
    name = (yield from _read_name(reader)) if marker else ""
    if not name:
        calls.abandon()
    elif (yield from reader.peek()) not in ("`", "<"):
        if (yield from read_arguments(reader, calls, name)):
            yield from _read_call_end(reader, calls)
    elif (yield from _read_end(reader)) and calls.name(name):
        calls.commit()
    else:
        calls.abandon()


def _read_name(reader: Reader) -> Waits[str]:
    """Take what precedes the arguments; empty if it is not that.

    It is `name<sep>` (V3.1), or `function<sep>name` and the start of a code fence (V3).
    """
    name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
    if not (yield from read_one_of(reader, (_SEPARATOR,))):
        return ""
    yield from skip_space(reader)
    if name != "function" or (yield from reader.peek()) in ("{", '"', "<"):
        return name
    name = yield from read_run(reader, _NAME, _MAX_NAME_CHARS)
    yield from skip_space(reader)
    if not (yield from read_one_of(reader, (_FENCE + "json",))):
        return ""
    yield from skip_space(reader)
    return name


def _read_call_end(reader: Reader, calls: CallWriter) -> Waits[None]:
    calls.begin()
    if (yield from _read_end(reader)):
        calls.drop_record()
    else:
        calls.abandon()


def _read_end(reader: Reader) -> Waits[bool]:
    yield from skip_space(reader)
    has_fence = (yield from reader.peek()) == "`" and bool((yield from read_one_of(reader, (_FENCE,))))
    yield from skip_space(reader)
    return bool((yield from read_one_of(reader, (_CALL_END,)))) or has_fence


_GRAMMAR = calls_behind((_CALLS_BEGIN, _CALL_BEGIN), _read, ends=(_CALLS_END,))
_MARKERS = frozenset({_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR})
DEEPSEEK = ToolGrammar(
    name="deepseek",
    grammar=_GRAMMAR,
    markers=_MARKERS,
    named_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}{{name}}\n{_FENCE}json\n",
    any_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}",
    form=CallForm(_CALLS_BEGIN, f"\n{_FENCE}{_CALL_END}{_CALLS_END}"),
)
DEEPSEEK_V31 = ToolGrammar(
    name="deepseek_v31",
    grammar=_GRAMMAR,
    markers=_MARKERS,
    named_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}{{name}}{_SEPARATOR}",
    any_prefix=f"{_CALLS_BEGIN}{_CALL_BEGIN}",
    form=CallForm(_CALLS_BEGIN, f"{_CALL_END}{_CALLS_END}"),
)
