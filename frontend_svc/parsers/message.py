"""Parser of one assistant message: separates the reasoning, then finds tool calls. Knows no format."""

from __future__ import annotations

from frontend_svc.parsers.parser import (
    CallRules,
    ContentPiece,
    Piece,
    PieceParser,
    ReasoningFormat,
    ToolParser,
    ToolParserFormat,
)


class MessageParser:
    """Parses the text of one message incrementally. None: that parser is not used."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: PieceParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def finds_calls(self) -> bool:
        return self._tools is not None

    @property
    def num_calls(self) -> int:
        """Number of complete calls."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> list[Piece]:
        """Add `text`; returns the pieces that became certain, in order."""
        if self._reasoning is None:
            return self._find_calls([ContentPiece(text)] if text else [])
        return self._find_calls(self._reasoning.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The pieces held back, once no more text comes, see `PieceParser`. Called once."""
        pieces = [] if self._reasoning is None else self._find_calls(self._reasoning.finish())
        return pieces if self._tools is None else pieces + self._tools.finish(is_cut=is_cut)

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._tools.feed(piece.text) if isinstance(piece, ContentPiece) else [piece]
        return found


def open_message(
    tools: ToolParserFormat | None,
    reasoning: ReasoningFormat | None,
    *,
    prompt: str,
    rules: CallRules,
    forced_prefix: str = "",
) -> MessageParser:
    """A parser for the message that follows `prompt`.

    Without tool names in `rules` no calls are searched for, and their text is content. `forced_prefix` is
    text appended to the prompt, after `reasoning.closing`, to open a call: there is no reasoning then.
    """
    finds_calls = tools is not None and bool(rules.tool_names)
    tool_parser = (
        tools.open(rules, forced_prefix=forced_prefix) if tools is not None and finds_calls else None
    )
    emits_reasoning = finds_calls and tools is not None and tools.includes_reasoning
    if reasoning is None or forced_prefix or emits_reasoning:
        return MessageParser(None, tool_parser)
    return MessageParser(reasoning.open(prompt), tool_parser)
