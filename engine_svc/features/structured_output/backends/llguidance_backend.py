"""Grammars by llguidance: an Earley parser over lexemes, whose every step has a limit in fuel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from engine_svc.features.structured_output.backends.backend import (
    MAX_SMALL_CHARS,
    CompiledGrammar,
    Matcher,
    MatcherError,
    Vocabulary,
    check_masks,
)
from engine_svc.features.structured_output.constraint import Constraint
from engine_svc.features.structured_output.llguidance_text import (
    UNUSED_CHARACTER,
    grammar_error,
    grammar_text,
    parser_limits,
    short_message,
    with_markers_apart,
)
from triptych_kit.process.setup import release_memory

if TYPE_CHECKING:
    from torch import Tensor

    from engine_svc.features.structured_output.vocabulary_process import VocabularyProcess

_PAUSE_S = 0.05


class LLGuidanceBackend:
    """Compiles for one vocabulary.

    process: that has read the vocabulary. Without one it is read here, which takes a second at 64k tokens and
    holds Python's lock.
    """

    def __init__(
        self, vocabulary: Vocabulary, num_threads: int = 1, process: VocabularyProcess | None = None
    ) -> None:
        self.vocabulary = vocabulary
        eos_ids = list(vocabulary.eos_ids)
        if not eos_ids:
            raise ValueError("a vocabulary without an end token cannot end an output")
        if process is None:
            text, self.special_ids = with_markers_apart(vocabulary.tokenizer_json)
            self._tokenizer = LLTokenizer(text, n_vocab=vocabulary.size, eos_token=eos_ids)
        else:
            self.special_ids = process.marker_ids
            tokenizer = LLTokenizer(TokenizerWrapper(process), eos_token=eos_ids, slices=[])
            # Each of the two holds Python's lock, and other threads wait for it.
            time.sleep(_PAUSE_S)
            self._tokenizer = tokenizer.with_slices(LLTokenizer.general_slices())
        self._executor = LLExecutor(num_threads)

    def compile(self, constraint: Constraint, grammar: str = "") -> CompiledGrammar:
        grammar = grammar or grammar_text(constraint, self.special_ids)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            # The first mask is by far the longest, and copies keep what it took.
            matcher.compute_bitmask()
        if len(grammar) > MAX_SMALL_CHARS:
            # Compiling takes several times what the grammar keeps.
            release_memory()
        if matcher.is_error():
            raise grammar_error(constraint, matcher.get_error().replace(UNUSED_CHARACTER, ""))
        return _LLGuidanceGrammar(matcher, self.vocabulary, len(grammar))

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Tensor) -> list[int]:
        check_masks(masks, self.vocabulary.num_words)
        for _, row in matchers:
            if not 0 <= row < masks.shape[0]:
                raise IndexError(f"row {row} is not within the {masks.shape[0]} rows of masks")
        pairs = [(cast(LLGuidanceMatcher, matcher).inner, row) for matcher, row in matchers]
        self._executor.unsafe_compute_mask_ptr(
            pairs, masks.data_ptr(), 4 * self.vocabulary.num_words, masks.shape[0]
        )
        return [index for index, (inner, _) in enumerate(pairs) if inner.is_error()]


class _LLGuidanceGrammar:
    def __init__(self, initial: LLMatcher, vocabulary: Vocabulary, num_chars: int) -> None:
        self._initial = initial  # never advanced
        self._vocabulary = vocabulary
        self.size_bytes = 100_000 + 100 * num_chars

    def matcher(self) -> Matcher:
        return LLGuidanceMatcher(self._initial.deep_copy(), self._vocabulary, has_ended=False)


class LLGuidanceMatcher:
    """A matcher whose errors, which llguidance keeps as a state, are raised.

    Where nothing may follow, llguidance stops by itself and does not count an end token: this class does.
    """

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary, has_ended: bool) -> None:
        self.inner = inner
        self._vocabulary = vocabulary
        self._has_ended = has_ended  # by an end token after llguidance had stopped

    @property
    def is_accepting(self) -> bool:
        return self.inner.is_accepting()

    @property
    def is_terminated(self) -> bool:
        return self.inner.is_stopped()

    def fill_mask(self, masks: Tensor, row: int) -> None:
        check_masks(masks, self._vocabulary.num_words)
        if not 0 <= row < masks.shape[0]:
            raise IndexError(f"row {row} is not within the {masks.shape[0]} rows of masks")
        size = 4 * self._vocabulary.num_words
        self.inner.unsafe_compute_mask_ptr(masks.data_ptr() + row * size, size)
        self._check()

    def accept(self, token_ids: Sequence[int]) -> int:
        known = self._known(token_ids)
        count = self.inner.try_consume_tokens(known)
        self._check()
        if self._ends_at(known, count):
            self._has_ended = True
            count += 1
        return count

    def rollback(self, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, at least 0 is needed")
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens and not self.inner.rollback(num_tokens):
            self._check()
            raise MatcherError(f"cannot forget {num_tokens} tokens")

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.inner.deep_copy(), self._vocabulary, self._has_ended)

    def _known(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first that is not in the vocabulary, which would be an error for good."""
        known = []
        for token_id in token_ids:
            if not 0 <= token_id < self._vocabulary.size:
                break
            known.append(token_id)
        return known

    def _ends_at(self, token_ids: list[int], index: int) -> bool:
        return (
            index < len(token_ids)
            and token_ids[index] in self._vocabulary.eos_ids
            and not self._has_ended
            and self.inner.stop_reason() == "NoExtension"
        )

    def _check(self) -> None:
        if self.inner.is_error():
            raise MatcherError(short_message(self.inner.get_error()))
