"""Incremental detokenizer for one request's output. Knows no stop strings and no wire."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_TOKENS = 4
# A character has at most four bytes, so eight tokens without a complete one are not the start of a character.
_MAX_HELD_TOKENS = 8
# Enough tokens for the longest incomplete character and for the spacing rules of every decoder in use.
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 64


class Detokenizer:
    """Emits text as soon as it is certain; all of it together equals one decode of all ids.

    `DecodeStream` handles the ordinary case. It has two gaps, and both are handled by decoding a small window
    until the text is complete again: it holds back everything while the newest text is not valid UTF-8, at a
    cost that grows with the square of what it holds, and it raises when a decoder with byte tokens revises
    text that was already emitted. Text that is still incomplete at the end is returned by `flush`.

    Special tokens are left out with `skip_special_tokens`, except for `marker_ids`. Adjacent tokens of
    `joined_ids` are joined without the space that some decoders write between any two tokens.

    The prompt's last tokens seed the stream, so that decoders which strip a leading space do so at the
    start of the prompt and not at the start of the output.
    """

    __slots__ = (
        "_context", "_held", "_is_behind_joined", "_joined_ids", "_num_emitted", "_skip", "_skipped_ids",
        "_stream", "_tokenizer",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        special_ids: frozenset[int],
        skip_special_tokens: bool,
        marker_ids: frozenset[int] = frozenset(),
        joined_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        # With markers the library skips nothing: this class decides which special tokens are shown.
        self._skip = skip_special_tokens and not marker_ids
        self._skipped_ids = special_ids - marker_ids if skip_special_tokens else frozenset()
        self._joined_ids = joined_ids
        self._is_behind_joined = False
        self._context = self._seed(prompt_token_ids)
        self._held: list[int] = []
        self._num_emitted = 0
        self._stream: DecodeStream | None = self._new_stream()

    def feed(self, token_id: int) -> str:
        """Add the next token; returns the text that became certain, which may be empty."""
        # Skipped here and not by the stream, which would keep all of them in its buffer.
        if token_id in self._skipped_ids:
            return ""
        if not self._joined_ids:
            return self._advance(token_id)
        was_behind, self._is_behind_joined = self._is_behind_joined, token_id in self._joined_ids
        text = self._advance(token_id)
        return text.removeprefix(" ") if was_behind and self._is_behind_joined else text

    def _advance(self, token_id: int) -> str:
        self._held.append(token_id)
        if self._stream is None:
            return self._advance_window()
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001  The library has no exception class for revised text.
            return self._leave_stream()
        if text:
            self._context = self._held
            self._held = []
            return text
        if len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._leave_stream()

    def flush(self) -> str:
        """The rest at the end: incomplete bytes, as U+FFFD like in a one-shot decode."""
        if not self._held:
            return ""
        if self._stream is not None:
            self._num_emitted = len(self._decode(self._context))
        text = self._decode(self._context + self._held)[self._num_emitted :]
        self._context, self._held = self._context + self._held, []
        self._num_emitted += len(text)
        return text

    def _leave_stream(self) -> str:
        self._stream = None
        self._num_emitted = len(self._decode(self._context))
        return self._advance_window()

    def _advance_window(self) -> str:
        window = self._context + self._held
        text = self._decode(window)
        is_whole = not text.endswith(_REPLACEMENT)
        # Only the last U+FFFD can still become a character: a decoder writes one for an incomplete tail.
        num_certain = len(text) if is_whole else len(text) - 1
        emitted = text[self._num_emitted : num_certain]
        self._num_emitted = max(self._num_emitted, num_certain)
        if is_whole:
            self._context, self._held = window[-_CONTEXT_TOKENS:], []
            self._stream = self._new_stream()
        elif len(window) > _MAX_WINDOW_TOKENS:
            self._context, self._held = [], window[-_CONTEXT_TOKENS:]
            self._num_emitted = max(0, len(self._decode(self._held)) - 1)
        return emitted

    def _seed(self, prompt_token_ids: Sequence[int]) -> list[int]:
        seed = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if i not in self._skipped_ids]
        # A stream seeded with a partial character would emit the seed's text once that is complete. The seed
        # may also begin within a character, and some decoders then write U+FFFD for all that follows.
        for start in range(_MAX_CHARACTER_TOKENS):
            if not self._decode(seed[start:]).endswith(_REPLACEMENT):
                return seed[start:]
        return []

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
