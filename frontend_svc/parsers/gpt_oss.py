"""The channels of gpt-oss: reasoning, answer and tool calls, each a separate message with a header."""

from __future__ import annotations

import re
from dataclasses import dataclass

from frontend_svc.parsers.call_object import read_arguments
from frontend_svc.parsers.grammar_parser import ToolGrammar
from frontend_svc.parsers.parser import CallForm, CallRules, ReasoningParser
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_run, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_HEADER = (_CHANNEL, _CONSTRAIN, _MESSAGE)
_BREAKS = Markers(_START, _CHANNEL, _END, _CALL, _RETURN)
_ENDINGS = (_END, _CALL, _RETURN)
_TEXT = re.compile(r"[^<]*")
_MAX_HEADER_CHARS = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAMESPACE = "functions."
_NO_MARKERS = r"([^<]|<+[^<|])*"


@dataclass(frozen=True, slots=True)
class _Header:
    is_reasoning: bool
    recipient: str


class _Channels:
    """Joins messages of one kind by a line break, as nothing else separates them."""

    __slots__ = ("_calls", "_emitted", "_is_new")

    def __init__(self, calls: CallWriter) -> None:
        self._calls = calls
        self._emitted: set[bool] = set()
        self._is_new = False

    def begin_message(self) -> None:
        self._is_new = True

    def content(self, text: str) -> None:
        self._calls.content(self._joined(text, is_reasoning=False))

    def reasoning(self, text: str) -> None:
        self._calls.pieces.reasoning(self._joined(text, is_reasoning=True))

    def _joined(self, text: str, *, is_reasoning: bool) -> str:
        joined = "\n" + text if self._is_new and is_reasoning in self._emitted else text
        self._is_new = False
        self._emitted.add(is_reasoning)
        return joined


def _parse(reader: Reader, calls: CallWriter) -> Waits[None]:
    channels = _Channels(calls)
    sink = channels.content
    while True:
        marker = yield from read_until(reader, _BREAKS, sink)
        if marker is None:
            return
        calls.begin()
        yield from read_one_of(reader, (marker,))
        if marker in _ENDINGS:
            calls.drop_record()
            continue
        header = yield from _read_header(reader, marker)
        sink = channels.content
        if header is None:
            calls.abandon()
            continue
        if header.is_reasoning or not header.recipient:
            calls.drop_record()
            channels.begin_message()
            sink = channels.reasoning if header.is_reasoning else channels.content
        elif header.recipient.startswith(_NAMESPACE):
            yield from _read_call(reader, calls, header.recipient.removeprefix(_NAMESPACE))
        else:
            calls.abandon()


def _read_header(reader: Reader, marker: str) -> Waits[_Header | None]:
    """Take `assistant<|channel|>name to=recipient <|constrain|>json<|message|>`, whose `marker` was taken."""
    # The text before the channel marker, after it, and after the constraint marker.
    parts = {_START: "", _CHANNEL: "", _CONSTRAIN: ""}
    num_left = _MAX_HEADER_CHARS
    while marker != _MESSAGE:
        text = yield from read_run(reader, _TEXT, num_left)
        parts[marker] += text
        num_left -= len(text)
        marker = yield from read_one_of(reader, _HEADER)
        num_left -= len(marker)
        if not marker or num_left < 0:
            return None
    recipient = _RECIPIENT.search(f"{parts[_START]} {parts[_CHANNEL]}")
    channel = parts[_CHANNEL].split()[:1]
    return _Header(channel == ["analysis"], recipient.group(1) if recipient else "")


def _read_call(reader: Reader, calls: CallWriter, name: str) -> Waits[None]:
    yield from skip_space(reader)
    if (yield from reader.peek()) != "<":
        if (yield from read_arguments(reader, calls, name)):
            yield from skip_space(reader)
    elif (yield from read_one_of(reader, (_CALL,))) and calls.name(name):
        calls.commit()
    else:
        calls.abandon()


_MARKERS = frozenset({_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN})
GPT_OSS = ToolGrammar(
    name="gpt_oss",
    grammar=_parse,
    markers=_MARKERS,
    named_prefix="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    any_prefix="<|channel|>commentary to=functions.",
    form=CallForm(
        f"{_CHANNEL}commentary to={_NAMESPACE}",
        "",
        f"{_END}{_START}assistant",
        answer=f"{_CHANNEL}final{_MESSAGE}",
        text=_NO_MARKERS,
        preface=(f"{_CHANNEL}analysis{_MESSAGE}", f"{_END}{_START}assistant"),
    ),
    trims_space=False,
    includes_reasoning=True,
)


@dataclass(frozen=True, slots=True)
class GptOssReasoning:
    """The channels without tools, see `ReasoningFormat`. Calls stay text."""

    name: str = "gpt_oss"
    markers: frozenset[str] = _MARKERS
    needs_special_tokens: bool = True

    @property
    def block(self) -> tuple[str, str]:
        """The header of the analysis channel, and the end of a message."""
        return f"{_CHANNEL}analysis{_MESSAGE}", _END

    def closing(self, prompt: str) -> str:
        """Empty: each message has a header, and no prompt opens a reasoning message."""
        return ""

    def open(self, prompt: str) -> ReasoningParser:
        return GPT_OSS.open(CallRules(frozenset()))


GPT_OSS_REASONING = GptOssReasoning()
