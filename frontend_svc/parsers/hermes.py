"""Tool calls of the Hermes and Qwen families: a JSON object between tags."""

from __future__ import annotations

from frontend_svc.parsers.call_object import read_call
from frontend_svc.parsers.grammar_parser import ToolGrammar
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter

_START, _END = "<tool_call>", "</tool_call>"
_OUTSIDE = Markers(_START)
_INSIDE = Markers(_START, _END)


def _parse(reader: Reader, calls: CallWriter) -> Waits[None]:
    is_inside = False
    while True:
        marker = yield from read_until(reader, _INSIDE if is_inside else _OUTSIDE, calls.content)
        if marker is None:
            return
        calls.begin()
        yield from read_one_of(reader, (marker,))
        if marker == _START:
            is_inside = yield from _read_calls(reader, calls)
        else:
            calls.drop_record()
            calls.drop_space()
            is_inside = False


def _read_calls(reader: Reader, calls: CallWriter) -> Waits[bool]:
    """Take the calls between one pair of tags, normally one; False if there was none."""
    yield from skip_space(reader)
    num_read = 0
    while (yield from reader.peek()) == "{":
        if not (yield from read_call(reader, calls, other_keys=None, needs_arguments=False)):
            break
        calls.commit()
        num_read += 1
        calls.begin()
        yield from skip_space(reader)
    calls.abandon()
    return num_read > 0


HERMES = ToolGrammar(
    name="hermes",
    grammar=_parse,
    markers=frozenset({_START, _END}),
    named_prefix='<tool_call>\n{"name": "{name}", "arguments": ',
    any_prefix='<tool_call>\n{"name": "',
)
