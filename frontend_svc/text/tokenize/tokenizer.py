"""A model's tokenizer for the frontend. Knows no requests and no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.tokenize.token_text import TokenTexts
from frontend_svc.text.workers.workers import Encoded, TextWorkers

# Normalizers that hardly shorten text, so that its length gives a lower bound of the number of tokens.
_KEEPS_LENGTH = (None, "NFC", "NFD")


class ModelTokenizer:
    """One model's tokenizer, read-only and shared by all requests.

    Long operations run in text workers, which load `files`. `tokenizer` is the same tokenizer in this
    process: it decodes tokens one at a time, which takes a microsecond.
    """

    def __init__(self, tokenizer: Tokenizer, workers: TextWorkers, files: TextFiles) -> None:
        self._tokenizer = tokenizer
        self._workers = workers
        self._files = files
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        normalizer = tokenizer.normalizer
        self._max_token_chars = None
        if (None if normalizer is None else type(normalizer).__name__) in _KEEPS_LENGTH:
            # Only then, as it takes 0.3 s for a vocabulary of 262,144 tokens.
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            self._max_token_chars = max((len(token) for token in vocabulary), default=1)
        self.token_texts = TokenTexts(tokenizer)
        # As in text workers: what tokenizer.json says of batches would be taken for special tokens here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.pair_template = PairTemplate(tokenizer)
        alone = tokenizer.encode("a", add_special_tokens=True).sequence_ids
        self.num_special_behind = next((n for n, kind in enumerate(reversed(alone)) if kind is not None), 0)

    @property
    def files(self) -> TextFiles:
        return self._files

    @property
    def workers(self) -> TextWorkers:
        return self._workers

    def has_token(self, text: str) -> bool:
        """Whether `text` is a single token."""
        return self._tokenizer.token_to_id(text) is not None

    def min_num_tokens(self, text: str) -> int:
        """A cheap lower bound of the number of tokens of `text`; 0 if none is known."""
        return 0 if self._max_token_chars is None else -(-len(text) // self._max_token_chars)

    async def encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """The token ids of `text`. Errors name `field`."""
        return await self._workers.encode(
            self._files, text, add_special_tokens=add_special_tokens, field=field
        )

    async def encode_all(self, texts: Mapping[str, str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of a few short texts by their fields, which errors name."""
        return await self._workers.encode_all(self._files, texts, add_special_tokens=add_special_tokens)

    async def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool, field: str = "text"
    ) -> Encoded:
        """The tokens of `text` as spelled in the vocabulary, with their offsets in it."""
        return await self._workers.encode_with_offsets(
            self._files, text, add_special_tokens=add_special_tokens, field=field
        )

    async def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, field: str = "token_ids"
    ) -> str:
        """The text of `token_ids`, decoded in one piece."""
        return await self._workers.decode(
            self._files, token_ids, skip_special_tokens=skip_special_tokens, field=field
        )

    async def render(self, conversation: Mapping[str, object], *, max_chars: int) -> str:
        """The prompt of a conversation, see `ChatTemplate.render`. Raises InvalidArgument."""
        return await self._workers.render(self._files, conversation, max_chars=max_chars)

    async def render_and_encode(
        self, conversation: Mapping[str, object], *, max_chars: int, field: str = "messages"
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation and its token ids. Errors name `field`, or a message of it."""
        return await self._workers.render_and_encode(
            self._files, conversation, max_chars=max_chars, field=field
        )

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        markers: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """A detokenizer for output after `prompt_token_ids` that keeps the special tokens `markers`."""
        ids = {self._tokenizer.token_to_id(marker) for marker in markers}
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            special_ids=self._special_ids,
            skip_special_tokens=skip_special_tokens,
            marker_ids=self._special_ids & ids,
            joined_ids=frozenset() if spaces_between_special_tokens else self._special_ids,
        )


class PairTemplate:
    """How a tokenizer joins two texts into one prompt: the special tokens before, between and after them.

    Derived from one pair, so that texts can be tokenized separately, each once, and token ids can be joined.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encode("a", "b", add_special_tokens=True)
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        num_seen = 0
        self._has_types = any(encoding.type_ids)
        self._num_before_second = 0  # tokens in between that have the type of the first text
        columns = zip(encoding.ids, encoding.sequence_ids, encoding.type_ids, strict=True)
        for token_id, sequence, kind in columns:
            if sequence is None:
                parts[num_seen].append(token_id)
                self._num_before_second += num_seen == 1 and not kind
            else:
                num_seen = sequence + 1
        self._before, self._between, self._behind = parts

    def join(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Join two texts that were tokenized without special tokens."""
        return [*self._before, *first, *self._between, *second, *self._behind]

    @property
    def num_special(self) -> int:
        """Special tokens of a joined pair."""
        return len(self._before) + len(self._between) + len(self._behind)

    def second_start(self, first: Sequence[int]) -> int | None:
        """Index in the joined ids of the first token with the second text's type; None: all have one type."""
        return len(self._before) + len(first) + self._num_before_second if self._has_types else None
