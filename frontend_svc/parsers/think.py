"""Reasoning between tags at the beginning of a message, opened by the model or by the prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass

from frontend_svc.parsers.grammar_parser import GrammarParser
from frontend_svc.parsers.parser import ReasoningParser
from frontend_svc.parsers.reader import (
    SPACE,
    Markers,
    Reader,
    Waits,
    read_all,
    read_one_of,
    read_run,
    read_until,
    skip_space,
)
from frontend_svc.parsers.writer import PieceWriter

_LINES = re.compile(r"\n*")
_MAX_LINES = 1 << 20


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Reasoning between `opening` and `closing_tag`, see `ReasoningFormat`.

    Only tags at the beginning of the message count; later ones are text. Line breaks beside a tag belong to
    the format and are dropped. Reasoning that is never closed is reasoning to the end.
    """

    name: str
    opening: str
    closing_tag: str

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.opening, self.closing_tag})

    @property
    def needs_special_tokens(self) -> bool:
        return True

    @property
    def block(self) -> tuple[str, str]:
        return self.opening, self.closing_tag

    def closing(self, prompt: str) -> str:
        return f"\n{self.closing_tag}\n\n" if self._is_opened_by(prompt) else ""

    def open(self, prompt: str) -> ReasoningParser:
        reader, pieces = Reader(), PieceWriter()
        return GrammarParser(reader, self._parse(reader, pieces, self._is_opened_by(prompt)), pieces)

    def _is_opened_by(self, prompt: str) -> bool:
        # A tag further up is part of the conversation, perhaps written by the user.
        return prompt.rstrip(SPACE).endswith(self.opening)

    def _parse(self, reader: Reader, pieces: PieceWriter, is_opened: bool) -> Waits[None]:
        reader.begin_record()
        yield from skip_space(reader)
        # Some models write the opening tag again after a prompt that ends with it.
        opening = yield from read_one_of(reader, (self.opening,))
        beginning = reader.end_record()
        if opening:
            beginning = ""
        elif not is_opened:
            pieces.content(beginning)
            yield from read_all(reader, pieces.content)
            return
        yield from self._read_reasoning(reader, pieces, beginning.lstrip("\n"))
        yield from read_run(reader, _LINES, _MAX_LINES)
        yield from read_all(reader, pieces.content)

    def _read_reasoning(self, reader: Reader, pieces: PieceWriter, beginning: str) -> Waits[None]:
        reasoning = _Reasoning(pieces)
        # Text taken while looking for a second opening tag may contain the beginning of the closing one.
        reader.push_back(beginning)
        if not beginning:
            yield from read_run(reader, _LINES, _MAX_LINES)
        closing = yield from read_until(reader, Markers(self.closing_tag), reasoning.add)
        if closing is None:
            reasoning.release()
        else:
            yield from read_one_of(reader, (self.closing_tag,))


class _Reasoning:
    """Holds back line breaks until it is known whether the closing tag follows them."""

    __slots__ = ("_lines", "_pieces")

    def __init__(self, pieces: PieceWriter) -> None:
        self._pieces = pieces
        self._lines: list[str] = []

    def add(self, text: str) -> None:
        kept = text.rstrip("\n")
        if kept:
            self.release()
            self._pieces.reasoning(kept)
        self._lines.append(text[len(kept) :])

    def release(self) -> None:
        self._pieces.reasoning("".join(self._lines))
        self._lines.clear()


THINK = ThinkTags("think", "<think>", "</think>")
MISTRAL_THINK = ThinkTags("mistral_think", "[THINK]", "[/THINK]")
