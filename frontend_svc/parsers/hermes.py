"""Tool calls of the Hermes and Qwen families: a JSON object between tags."""

from __future__ import annotations

from frontend_svc.parsers.call_object import read_calls
from frontend_svc.parsers.grammar_parser import ToolGrammar, calls_behind
from frontend_svc.parsers.parser import CallForm
from frontend_svc.parsers.reader import Reader, Waits, skip_space
from frontend_svc.parsers.writer import CallWriter

_START, _END = "<tool_call>", "</tool_call>"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Waits[None]:
    """Take the values between one pair of tags, normally one."""
    yield from skip_space(reader)
    while (yield from reader.peek()) in ("{", "["):
        yield from read_calls(reader, calls, other_keys=None)
        calls.begin()
        yield from skip_space(reader)
    calls.abandon()


HERMES = ToolGrammar(
    name="hermes",
    grammar=calls_behind((_START,), _read, ends=(_END,)),
    markers=frozenset({_START, _END}),
    named_prefix='<tool_call>\n{"name": "{name}", "arguments": ',
    any_prefix='<tool_call>\n{"name": "',
    form=CallForm(_START, f"}}\n{_END}", "\n"),
)
