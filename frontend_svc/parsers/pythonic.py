"""Tool calls of Llama 3.2 and 4: a Python list of calls with literal arguments."""

from __future__ import annotations

import re

from frontend_svc.parsers.grammar_parser import ToolGrammar, calls_behind
from frontend_svc.parsers.json_scanner import read_scanned
from frontend_svc.parsers.parser import CallForm
from frontend_svc.parsers.python_calls import BracketScanner, read_cut_calls, read_python_calls
from frontend_svc.parsers.reader import Reader, Waits, read_one_of, read_run, skip_space
from frontend_svc.parsers.writer import CallWriter

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_MAX_NAME_CHARS = 256
# A text that does not begin as a list does; it may be empty.
_NO_LIST = r"[ \t\r\n]*([^\[ \t\r\n](.|\n)*)?"


def _read(reader: Reader, calls: CallWriter, marker: str) -> Waits[None]:
    """Take `[name(...), ...]`; a list that is not of calls is content to its end.

    The first name is checked at once, so that other text in brackets is held back only for one word.
    """
    yield from skip_space(reader)
    is_list = bool((yield from read_one_of(reader, "[")))
    yield from skip_space(reader)
    name = (yield from read_run(reader, _NAME, _MAX_NAME_CHARS)) if is_list else ""
    yield from skip_space(reader)
    if not name or (yield from reader.peek()) != "(":
        calls.abandon()
        return
    source, scanner = [f"[{name}"], BracketScanner("[")
    is_whole = calls.knows(name) and (yield from read_scanned(reader, scanner, source.append))
    found, cut_call = read_python_calls("".join(source)) if is_whole else [], None
    if calls.knows(name) and reader.is_cut:
        found, cut_call = read_cut_calls("".join(source))
    all_calls = [*found, *([] if cut_call is None else [cut_call])]
    # A grammar holds the list alone that begins a message without a marker.
    is_held = not (marker and calls.is_held)
    if not is_held or not all_calls or not all(calls.knows(name) for name, _ in all_calls):
        calls.abandon()
        yield from read_scanned(reader, scanner, calls.content)
        return
    for name, arguments_json in found:
        calls.name(name, is_held=True)
        calls.whole_arguments(arguments_json)
        calls.commit()
    if cut_call is not None:
        calls.name(cut_call[0], is_held=True)
        calls.whole_arguments(cut_call[1])
        calls.abandon()


PYTHONIC = ToolGrammar(
    name="pythonic",
    grammar=calls_behind((_START,), _read, ends=(_END,), bare="["),
    markers=frozenset({_START, _END}),
    named_prefix="[{name}(",
    any_prefix="[",
    form=CallForm("[", ")", ", ", begins_list="[", ends_list="]", has_keywords=True, text=_NO_LIST),
)
