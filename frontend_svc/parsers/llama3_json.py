"""Tool calls of Llama 3: JSON objects, bare or after a tag; several are separated by semicolons."""

from __future__ import annotations

from frontend_svc.parsers.call_object import read_calls
from frontend_svc.parsers.grammar_parser import ToolGrammar, calls_behind
from frontend_svc.parsers.parser import CallForm
from frontend_svc.parsers.reader import Reader, Waits, skip_space
from frontend_svc.parsers.writer import CallWriter

_TAG = "<|python_tag|>"
# An object is a call only if it has no keys other than those of a call and these.
_OTHER_KEYS = frozenset({"type", "id", "index"})


def _read(reader: Reader, calls: CallWriter, marker: str) -> Waits[None]:
    yield from skip_space(reader)
    yield from read_calls(reader, calls, other_keys=_OTHER_KEYS)


LLAMA3_JSON = ToolGrammar(
    name="llama3_json",
    grammar=calls_behind((_TAG,), _read, bare="{["),
    markers=frozenset({_TAG}),
    named_prefix='{"name": "{name}", "parameters": ',
    any_prefix='{"name": "',
    form=CallForm('{"name": "', "}", "; "),
)
