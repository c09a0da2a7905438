"""Parsers that run a grammar over text that arrives in pieces. Knows no format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from frontend_svc.parsers.parser import CallRules, Piece, ToolParser, new_call_id
from frontend_svc.parsers.reader import Reader, Waits
from frontend_svc.parsers.writer import CallWriter, PieceWriter

CallGrammar: TypeAlias = Callable[[Reader, CallWriter], Waits[None]]


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

    def finish(self) -> list[Piece]:
        self._reader.end()
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

    def finish(self) -> list[Piece]:
        pieces = self._parser.finish()
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
