"""The text of one output: detokenized, parsed if it is a message, and ended by stop strings."""

from __future__ import annotations

from frontend_svc.output.collector import Ending
from frontend_svc.parsers.message import MessageParser
from frontend_svc.parsers.parser import ContentPiece, Piece
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer


class OutputText:
    """Turns token ids into text; with a `parser` into the pieces of a message instead.

    stops: with `stops_in_content` only the content of the message is searched, else all text.
    include_stop: the token that ends the output is part of its text.
    min_tokens: the first tokens, which cannot complete a stop string.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopBuffer | None,
        parser: MessageParser | None,
        *,
        stops_in_content: bool,
        include_stop: bool,
        min_tokens: int,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops_in_text = None if stops_in_content else stops
        self._stops_in_content = stops if stops_in_content else None
        self._parser = parser
        self._include_stop = include_stop
        self._min_tokens = min_tokens

    @property
    def has_stop_strings(self) -> bool:
        return self._stops_in_text is not None or self._stops_in_content is not None

    def advance(
        self, token_ids: list[int], num_before: int, ending: Ending | None
    ) -> tuple[str, list[Piece], str | None]:
        """Add tokens, of which `num_before` came before, and the engine's ending.

        Returns the new text or the new pieces, and the stop string that ended the output, if one did.
        """
        shown_ids = token_ids
        if ending is not None and ending.is_by_token and not self._include_stop:
            shown_ids = token_ids[:-1]
        texts = list(map(self._detokenizer.feed, shown_ids))
        if ending is not None:
            texts.append(self._detokenizer.flush())
        text = "".join(texts)
        # Text flushed at the end can complete a stop string, whatever `min_tokens` is.
        num_exempt = self._min_tokens - num_before
        num_scanned = sum(map(len, texts[num_exempt:])) if num_exempt > 0 else len(text)
        stop = None
        if self._stops_in_text is not None:
            text, stop = self._stops_in_text.push(text, num_scanned)
            if ending is not None and stop is None:
                text += self._stops_in_text.flush()
        if self._parser is None:
            return text, [], stop
        if self._stops_in_content is not None:
            return "", *self._parse_to_stop(self._parser, self._stops_in_content, text, num_scanned, ending)
        pieces = self._parser.feed(text)
        if stop is not None:
            return "", pieces + self._parser.finish(is_cut=True), stop
        return "", pieces + _last_pieces(self._parser, ending), None

    def _parse_to_stop(
        self, parser: MessageParser, stops: StopBuffer, text: str, num_scanned: int, ending: Ending | None
    ) -> tuple[list[Piece], str | None]:
        num_exempt = len(text) - num_scanned
        exempt = parser.feed(text[:num_exempt]) if num_exempt else []
        scanned = exempt + parser.feed(text[num_exempt:]) + _last_pieces(parser, ending)
        pieces: list[Piece] = []
        for index, piece in enumerate(scanned):
            if not isinstance(piece, ContentPiece):
                # A stop string does not extend over what stands between two parts of the content.
                _add_content(pieces, stops.flush())
                pieces.append(piece)
                continue
            shown, stop = stops.push(piece.text, 0 if index < len(exempt) else len(piece.text))
            _add_content(pieces, shown)
            if stop is not None:
                return pieces, stop
        if ending is not None:
            _add_content(pieces, stops.flush())
        return pieces, None


def _last_pieces(parser: MessageParser, ending: Ending | None) -> list[Piece]:
    return [] if ending is None else parser.finish(is_cut=not ending.is_by_token)


def _add_content(pieces: list[Piece], text: str) -> None:
    if text:
        pieces.append(ContentPiece(text))
