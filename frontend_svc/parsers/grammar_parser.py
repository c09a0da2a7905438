"""Parsers that run a grammar over text that arrives in pieces. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from frontend_svc.parsers.parser import CallForm, CallRules, Piece, ToolParser, new_call_id
from frontend_svc.parsers.reader import Markers, Reader, Waits, read_one_of, read_until, skip_space
from frontend_svc.parsers.writer import CallWriter, PieceWriter

CallGrammar: TypeAlias = Callable[[Reader, CallWriter], Waits[None]]
# Takes the calls behind a marker, which was taken; the marker is empty for bare calls.
CandidateGrammar: TypeAlias = Callable[[Reader, CallWriter, str], Waits[None]]


def calls_behind(
    starts: Sequence[str], read: CandidateGrammar, *, ends: Sequence[str] = (), bare: str = ""
) -> CallGrammar:
    """The grammar of calls that stand right behind one of `starts`, and of text that is content.

    ends: markers that are dropped behind a call. bare: characters with which a call without a marker begins,
    at the beginning of the message, or behind another call and a semicolon or line break.
    """
    outside, inside = Markers(*starts), Markers(*starts, *ends)

    def grammar(reader: Reader, calls: CallWriter) -> Waits[None]:
        is_inside = False
        while True:
            calls.begin()
            marker: str | None = None
            markers = inside if is_inside else outside
            if bare and (calls.is_first or calls.is_behind_call):
                marker = yield from _find_bare(reader, calls, markers, bare)
            if marker is None:
                calls.abandon()
                marker = yield from read_until(reader, markers, calls.content)
                if marker is None:
                    return
                calls.begin()
                yield from read_one_of(reader, (marker,))
            if marker in ends:
                calls.drop_record()
                calls.drop_space()
                is_inside = False
                continue
            num_before = calls.num_committed
            yield from read(reader, calls, marker)
            is_inside = is_inside or calls.num_committed > num_before

    return grammar


def _find_bare(reader: Reader, calls: CallWriter, markers: Markers, bare: str) -> Waits[str | None]:
    """Take what separates calls, and a marker if one follows; None if no call can follow."""
    is_separated = yield from skip_space(reader)
    if calls.is_behind_call:
        is_separated = bool((yield from read_one_of(reader, ";"))) or is_separated
        yield from skip_space(reader)
    if (is_separated or calls.is_first) and (char := (yield from reader.peek())) and char in bare:
        return ""
    return (yield from read_one_of(reader, markers.texts)) or None


class GrammarParser:
    """Runs a grammar of content and reasoning; see `PieceParser`."""

    __slots__ = ("_grammar", "_pieces", "_reader")

    def __init__(self, reader: Reader, grammar: Waits[None], pieces: PieceWriter) -> None:
        self._reader = reader
        self._grammar = grammar
        self._pieces = pieces

    def feed(self, text: str) -> list[Piece]:
        self._reader.push(text)
        next(self._grammar, None)
        return self._pieces.take()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        self._reader.end(is_cut=is_cut)
        next(self._grammar, None)
        return self._pieces.take()


class CallGrammarParser:
    """Runs a grammar of calls; see `ToolParser`."""

    __slots__ = ("_calls", "_parser")

    def __init__(self, reader: Reader, grammar: Waits[None], calls: CallWriter) -> None:
        self._calls = calls
        self._parser = GrammarParser(reader, grammar, calls.pieces)

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def feed(self, text: str) -> list[Piece]:
        return self._parser.feed(text)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        pieces = self._parser.finish(is_cut=is_cut)
        self._calls.finish()
        return pieces + self._calls.pieces.take()


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """A format of tool calls defined by a grammar, see `ToolParserFormat`.

    `named_prefix` opens a call, with `{name}` as placeholder of its tool's name; `any_prefix` leaves the name
    to the model. White space around calls is dropped unless `trims_space` is false.
    """

    name: str
    grammar: CallGrammar
    markers: frozenset[str]
    named_prefix: str
    any_prefix: str
    form: CallForm
    new_id: Callable[[], str] = new_call_id
    trims_space: bool = True
    includes_reasoning: bool = False

    @property
    def needs_special_tokens(self) -> bool:
        return bool(self.markers)

    def forced_prefix(self, tool_name: str | None) -> str:
        return self.any_prefix if tool_name is None else self.named_prefix.replace("{name}", tool_name)

    def open(self, rules: CallRules, *, forced_prefix: str = "") -> ToolParser:
        reader = Reader(forced_prefix)
        calls = CallWriter(reader, rules, self.new_id, trims_space=self.trims_space)
        return CallGrammarParser(reader, self.grammar(reader, calls), calls)
