"""Parsers that run a grammar over growing text. Knows no format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from frontend_svc.parsers.parser import CallRules, Piece, ToolParser, new_call_id
from frontend_svc.parsers.reader import Reader, Waits
from frontend_svc.parsers.writer import CallWriter, PieceWriter

CallGrammar: TypeAlias = Callable[[Reader, CallWriter], Waits[None]]


class GrammarParser:
    """Feeds a grammar of content and reasoning, and hands on what it wrote."""

    __slots__ = ("_grammar", "_pieces", "_reader")

    def __init__(self, reader: Reader, grammar: Waits[None], pieces: PieceWriter) -> None:
        self._reader = reader
        self._grammar = grammar
        self._pieces = pieces

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with `text`, in order."""
        self._reader.push(text)
        next(self._grammar, None)
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """What was held back, once it is known that no more text comes."""
        self._reader.end()
        next(self._grammar, None)
        return self._pieces.take()


class CallGrammarParser:
    """Feeds a grammar of calls, and hands on what it wrote."""

    __slots__ = ("_calls", "_parser")

    def __init__(self, reader: Reader, grammar: Waits[None], calls: CallWriter) -> None:
        self._calls = calls
        self._parser = GrammarParser(reader, grammar, calls.pieces)

    @property
    def num_calls(self) -> int:
        """How many calls were told and are whole."""
        return self._calls.num_calls

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with `text`, in order."""
        return self._parser.feed(text)

    def finish(self) -> list[Piece]:
        """What was held back, once it is known that no more text comes."""
        pieces = self._parser.finish()
        self._calls.finish()
        return pieces + self._calls.pieces.take()


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """A format of tool calls that is a grammar: see `ToolParserFormat`.

    `named_prefix` opens a call, with `{name}` where its tool's name goes; `any_prefix` leaves the name to the
    model. White space around calls is dropped unless `trims_space` is false.
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
        """Whether the text must be detokenized with the `markers` shown."""
        return bool(self.markers)

    def forced_prefix(self, tool_name: str | None) -> str:
        """What opens a call of this tool, or of any, where the prompt ends."""
        return self.any_prefix if tool_name is None else self.named_prefix.replace("{name}", tool_name)

    def open(self, rules: CallRules, *, forced_prefix: str = "") -> ToolParser:
        """A parser for one message. `forced_prefix` is what the prompt's end has already opened."""
        reader = Reader(forced_prefix)
        calls = CallWriter(reader, rules, self.new_id, trims_space=self.trims_space)
        return CallGrammarParser(reader, self.grammar(reader, calls), calls)
