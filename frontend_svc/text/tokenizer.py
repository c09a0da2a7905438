"""Text to token ids and back, off the event loop. Knows no requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Tokenizer

from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.token_text import TokenTexts
from service_kit.errors import ResourceExhausted

T = TypeVar("T")

# Normalizers that never make text shorter by much, so that characters bound the number of tokens from below.
_KEEPS_LENGTH = (None, "NFC", "NFD")


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text: ids, spellings, and (start, end) in characters."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


class TokenizerPool:
    """The threads that tokenize, one a core, with a time limit on each piece of work.

    Threads and not processes: `encode` and `decode_batch` of the tokenizers library release the GIL, so the
    event loop goes on beside them, and no text is copied to another process. A thread cannot be killed: work
    over its limit is answered at once and runs out in the background, which the limit on the length of text
    (`ServedModel.max_text_chars`) keeps rare.
    """

    def __init__(self, num_threads: int | None = None, *, time_limit_s: float = 5.0) -> None:
        self._time_limit_s = time_limit_s
        self._threads = ThreadPoolExecutor(num_threads or _num_cores(), thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done in a thread. Raises ResourceExhausted when it is not there in time."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(self._time_limit_s):
                return await future
        except TimeoutError as error:
            raise ResourceExhausted(
                f"tokenizing took longer than the limit of {self._time_limit_s:g} s",
                reason="TOKENIZER_TIME_LIMIT",
                retry_after_ms=1000,
            ) from error

    def close(self) -> None:
        """Forget what is queued; what runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class ModelTokenizer:
    """One model's tokenizer, read-only and shared by all requests."""

    def __init__(self, tokenizer: Tokenizer, pool: TokenizerPool) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pool = pool
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._max_token_chars = max((len(token) for token in vocabulary), default=1)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self.token_texts = TokenTexts(tokenizer)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has text."""
        return self._vocab_size

    def min_num_tokens(self, text: str) -> int:
        """A cheap lower bound of the number of tokens of `text`; 0 where none can be told."""
        normalizer = self._tokenizer.normalizer
        name = None if normalizer is None else type(normalizer).__name__
        return -(-len(text) // self._max_token_chars) if name in _KEEPS_LENGTH else 0

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`."""

        def work() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

        return await self._pool.run(work)

    async def encode_with_places(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """The tokens of `text` as the vocabulary spells them, and where they stand in it."""

        def work() -> Encoded:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return Encoded(encoding.ids, encoding.tokens, encoding.offsets)

        return await self._pool.run(work)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`, all at once."""
        ids = list(token_ids)

        # The batch form, because the plain one holds the GIL.
        def work() -> str:
            return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

        return await self._pool.run(work)

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for output that continues `prompt_token_ids`."""
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            special_ids=self._special_ids,
            skip_special_tokens=skip_special_tokens,
        )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
