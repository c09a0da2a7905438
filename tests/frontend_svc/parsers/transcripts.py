"""Feeding transcripts to parsers in any cutting, and joining what comes out."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from frontend_svc.parsers.parser import (
    CallRules,
    ContentPiece,
    Piece,
    PieceParser,
    ReasoningPiece,
    ToolCallPiece,
    ToolParserFormat,
)

TOOLS = frozenset({"get_weather", "get_time", "math.add"})


@dataclass
class Message:
    """What the pieces of one message come to; each call is index, id, name, arguments.

    incomplete: the indexes of calls that are marked as such.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[int, str, str, str]] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)


def joined(pieces: Iterable[Piece]) -> Message:
    """All pieces of a message, joined; checks that the pieces of a call come as they must."""
    message = Message()
    for piece in pieces:
        if isinstance(piece, ContentPiece):
            assert piece.text
            message.content += piece.text
        elif isinstance(piece, ReasoningPiece):
            assert piece.text
            message.reasoning += piece.text
        else:
            _add_call(message, piece)
    return message


def _add_call(message: Message, piece: ToolCallPiece) -> None:
    assert piece.index not in message.incomplete
    if piece.is_incomplete:
        message.incomplete.append(piece.index)
    if piece.index == len(message.calls):
        assert piece.id and piece.name
        message.calls.append((piece.index, piece.id, piece.name, piece.arguments_json))
        return
    index, call_id, name, arguments = message.calls[-1]
    assert piece.index == index and not piece.id and not piece.name
    assert piece.arguments_json or piece.is_incomplete
    message.calls[-1] = (index, call_id, name, arguments + piece.arguments_json)


def rules(**changes: object) -> CallRules:
    """Rules for `TOOLS`, with ids c0, c1 and so on."""
    counter = itertools.count()
    fields: dict[str, object] = {"tool_names": TOOLS, "new_id": lambda: f"c{next(counter)}"}
    return CallRules(**{**fields, **changes})  # type: ignore[arg-type]


def run(parser: PieceParser, chunks: Iterable[str], *, is_cut: bool = False) -> Message:
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += parser.feed(chunk)
    return joined([*pieces, *parser.finish(is_cut=is_cut)])


def parse(
    format_: ToolParserFormat, text: str, *, forced_prefix: str = "", is_cut: bool = False, **changes: object
) -> Message:
    """Take `text` apart in one go and character by character, which must be the same."""
    whole = run(format_.open(rules(**changes), forced_prefix=forced_prefix), [text], is_cut=is_cut)
    single = run(format_.open(rules(**changes), forced_prefix=forced_prefix), text, is_cut=is_cut)
    assert whole == single
    return whole


def calls(*named: tuple[str, str]) -> list[tuple[int, str, str, str]]:
    """The calls of a message, given their names and arguments."""
    return [(index, f"c{index}", name, arguments) for index, (name, arguments) in enumerate(named)]


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """The text in chunks as a detokenizer makes them of bytes that are cut at `cuts`."""
    data = text.encode()
    ends = sorted({cut_at % (len(data) + 1) for cut_at in cuts} | {len(data)})
    decoder = codecs.getincrementaldecoder("utf-8")()
    starts = [0, *ends[:-1]]
    return [decoder.decode(data[start:end]) for start, end in zip(starts, ends, strict=True)]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
