"""Masks the logits of rows whose output has to belong to a language."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.errors import RequestFailed
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.structured_output.backends.backend import (
    GrammarBackend,
    Matcher,
    MatcherError,
    Vocabulary,
)
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.extras import GrammarTimes, StructuredOutput
from engine_svc.features.structured_output.grammars import Grammar, Grammars
from engine_svc.runner.feature import (
    HostTokens,
    LogitRows,
    PendingPart,
    RuleConflict,
    RunnerContext,
    RunnerFeature,
)
from engine_svc.runner.sampling.transfer import Ints, to_device
from triptych_kit.subsequences import end_of_first

logger = logging.getLogger(__name__)

_MAX_DEFAULT_THREADS = 8

_TOO_MUCH_WORK = RuleConflict("the grammar reached a limit on the work for one token")

_Words = npt.NDArray[np.int32]  # 32 tokens each


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature | None:
    path = Path(config.model) / "tokenizer.json"
    if not config.enable_structured_output or not path.is_file() or not context.eos_token_ids:
        return None
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    share = len(os.sched_getaffinity(0)) // (2 * num_ranks)
    vocabulary = Vocabulary(path.read_text(encoding="utf-8"), context.vocab_size, context.eos_token_ids)
    try:
        grammars = Grammars(
            vocabulary,
            num_threads=config.grammar_threads or max(1, min(_MAX_DEFAULT_THREADS, share)),
            max_entries=config.max_cached_grammars,
            max_bytes=config.grammar_cache_memory,
        )
    except RequestFailed as failure:
        logger.warning("no structured output with this model", extra={"error": failure.message})
        return Unavailable(failure)
    return StructuredOutputRows(grammars, vocabulary, context)


class Unavailable(RunnerFeature):
    """Ends every request with a constraint by the reason for which there are no grammars."""

    prepares = StructuredOutput

    def __init__(self, failure: RequestFailed) -> None:
        self._failure = failure

    def prepare(self, extra: StructuredOutput) -> Grammar:
        raise RequestFailed(self._failure.code, self._failure.message)

    def uses(self, admitted: AdmittedRequest) -> bool:
        return False


class _Row:
    """The state of one output, a function of its tokens."""

    def __init__(self, grammar: Grammar, admitted: AdmittedRequest, num_words: int) -> None:
        sampling = admitted.sampling
        self.grammar = grammar
        self.matcher: Matcher | None = None  # None: the constraint has not begun
        self.has_ended = False
        self.failure = ""
        self._before: list[int] = []  # newest tokens of the reasoning, one less than its end has
        self._end_ids = sampling.end_token_ids.union(grammar.spec.eos_token_ids)
        self._num_tokens = 0  # of the output
        self._min_tokens = sampling.min_tokens
        # Backends know the model's own ends alone, and no `min_tokens`.
        self._ends: _Words | None = None
        if self._min_tokens or not self._end_ids <= set(grammar.spec.eos_token_ids):
            self._ends = _mask_of(self._end_ids, num_words)
        # What the output may yet begin with beside a text of the language; from where the language does not
        # allow the beginning, that alone.
        self._opening = grammar.spec.reasoning_start
        self.is_opening = False
        if not grammar.spec.reasoning_end or self._opening:
            self.matcher = grammar.compiled.matcher()
        self.take(admitted.token_ids[admitted.num_prompt_tokens :])

    def after(self, draft: int) -> _Row:
        """The state after one more token."""
        if self.failure or self.has_ended:
            return self
        state = copy.copy(self)
        state.matcher = None if self.matcher is None else self.matcher.copy()
        state.take((draft,))
        return state

    @property
    def is_masked(self) -> bool:
        return self.matcher is not None and not self.has_ended

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance over tokens of the output; those after its end do not count."""
        known = list(token_ids)
        while self._opening and known and self.matcher is not None:
            known = self._take_opening(known)
        if self.matcher is None:
            marker, tokens = self.grammar.spec.reasoning_end, [*self._before, *known]
            begin = end_of_first(tokens, marker)
            if begin < 0:
                self._num_tokens += len(known)
                self._before = tokens[1 - len(marker) :] if len(marker) > 1 else []
                return
            self._num_tokens += begin - len(self._before)
            self._before, known = [], tokens[begin:]
            self.matcher = self.grammar.compiled.matcher()
        if self.has_ended or self.failure:
            return
        end = next((index for index, token in enumerate(known) if token in self._end_ids), len(known))
        self.has_ended = end < len(known)
        try:
            count = self.matcher.accept(known[:end]) if end else 0
        except MatcherError as error:
            self.failure = f"structured_output: {error}"
            return
        self._num_tokens += count
        if count < end:
            self.failure = (
                f"structured_output: the constraint does not allow token {known[count]} at position "
                f"{self._num_tokens} of the output"
            )

    def _take_opening(self, known: list[int]) -> list[int]:
        """Take a token that opens the reasoning, or what is left once the output turns out not to open it."""
        assert self.matcher is not None, "the language may hold from the first token"
        if known[0] != self._opening[0]:
            self._opening = ()
            if self.is_opening:
                self.failure = f"structured_output: token {known[0]} does not go on with the reasoning's mark"
            return known
        self._num_tokens += 1
        self._opening = self._opening[1:]
        if not self._opening:
            self.matcher, self.is_opening = None, False
        elif not self.is_opening:
            try:
                self.is_opening = self.matcher.accept(known[:1]) == 0
            except MatcherError as error:
                self.failure = f"structured_output: {error}"
        return known[1:]

    def put_opening(self, words: _Words) -> None:
        """Allow the output to open the reasoning. words: the row's mask."""
        if self._opening:
            word, bit = divmod(self._opening[0], 32)
            words.view(np.uint32)[word] |= np.uint32(1 << bit)

    def put_ends(self, words: _Words) -> RuleConflict | None:
        """Allow the request's own ends exactly where the output may end. words: the row's mask.

        Returns the rules that leave no token then, if they do.
        """
        if self._ends is None or self.matcher is None:
            return None
        is_accepting = self.matcher.is_accepting
        if is_accepting and self._num_tokens >= self._min_tokens:
            words |= self._ends
            return None
        words &= ~self._ends
        if words.any():
            return None
        if is_accepting:
            return RuleConflict(
                f"the constraint allows nothing after {self._num_tokens} tokens, "
                f"min_tokens is {self._min_tokens}"
            )
        return RuleConflict("the constraint allows stop_token_ids alone, where the output may not end")


class StructuredOutputRows(RunnerFeature):
    """The rows with a constraint. Masks are made from tokens alone, so that all ranks have the same."""

    prepares = StructuredOutput

    def __init__(self, grammars: Grammars, vocabulary: Vocabulary, context: RunnerContext) -> None:
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._device = context.device
        self._apply = context.ops.apply_token_mask
        self._rows: dict[int, _Row] = {}
        self._masks = torch.zeros(context.max_num_seqs, vocabulary.num_words, dtype=torch.int32)
        self._mask_of: dict[tuple[int, int], int] = {}  # by row and position, for the step that runs
        self._times = GrammarTimes(-1, 0)  # of its masks

    def prepare(self, extra: StructuredOutput) -> Grammar:
        return self._grammars.compile(extra)

    def stop_preparing(self) -> None:
        self._grammars.close()

    def is_slow_to_prepare(self, extra: StructuredOutput) -> bool:
        return self._grammars.is_slow(extra)

    def uses(self, admitted: AdmittedRequest) -> bool:
        return StructuredOutput in admitted.extras

    def example(self) -> StructuredOutput:
        return StructuredOutput(Constraint(ConstraintKind.REGEX, "a+"))

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        grammar: Grammar = admitted.extras[StructuredOutput]
        self._rows[row] = _Row(grammar, admitted, self._vocabulary.num_words)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def on_tokens(self, tokens: HostTokens) -> dict[int, str]:
        began_at = time.perf_counter()
        for row, token in zip(tokens.rows.tolist(), tokens.token_ids.tolist(), strict=True):
            self._rows[row].take((token,))
        failed = {}
        self._mask_of = {}
        by_backend: dict[GrammarBackend, list[tuple[Matcher, int]]] = {}
        masked: list[
            tuple[int, _Row, bool]
        ] = []  # row, state and whether that is after a draft, of each mask
        states: dict[int, _Row] = {}  # newest
        columns = tokens.sampling_rows.tolist(), tokens.positions.tolist(), tokens.drafts.tolist()
        for row, position, draft in zip(*columns, strict=True):
            state = states[row] = self._rows[row] if draft < 0 else states[row].after(draft)
            if state.failure:
                # A draft that is not allowed differs from the token that is sampled in its place.
                if draft < 0:
                    failed[row] = state.failure
            elif state.is_masked and state.matcher is not None:
                index = self._mask_of[row, position] = len(masked)
                masked.append((row, state, draft >= 0))
                if state.is_opening:
                    continue
                by_backend.setdefault(state.grammar.backend, []).append((state.matcher, index))
        if len(masked) > len(self._masks):
            self._masks = torch.zeros(len(masked), self._vocabulary.num_words, dtype=torch.int32)
        conflicts: dict[int, RuleConflict] = {}
        for backend, matchers in by_backend.items():
            for number in backend.fill_masks(matchers, self._masks):
                conflicts[matchers[number][1]] = _TOO_MUCH_WORK
        words = self._masks.numpy()
        for index, (row, state, is_after_draft) in enumerate(masked):
            if state.is_opening:
                words[index], conflict = 0, None
            else:
                conflict = conflicts.get(index) or state.put_ends(words[index])
            state.put_opening(words[index])
            if conflict and is_after_draft:
                words[index] = 0
            elif conflict:
                failed.setdefault(row, conflict)
        self._times = GrammarTimes(-1, round((time.perf_counter() - began_at) * 1e6))
        return failed

    def apply(self, logits: Tensor, some: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        columns = some.entries.tolist(), some.rows.tolist(), positions.tolist()
        pairs = [
            (entry, self._mask_of[row, position])
            for entry, row, position in zip(*columns, strict=True)
            if (row, position) in self._mask_of
        ]
        if pairs:
            entries, indices = np.array(pairs, dtype=np.int64).T
            masks = to_device(self._masks.numpy()[indices], self._device)
            self._apply(logits, masks, to_device(entries, self._device))

    def after_sampling(self, logits: Tensor, token_ids: Tensor, some: LogitRows) -> PendingPart | None:
        rows = some.rows.tolist()
        times = {rows[0]: self._times}
        for row in rows:
            grammar = self._rows[row].grammar
            if grammar.compile_us >= 0:
                masks_us = times[row].masks_us if row in times else -1
                times[row] = GrammarTimes(grammar.compile_us, masks_us)
                grammar.compile_us = -1
        return lambda: times


def _mask_of(token_ids: frozenset[int], num_words: int) -> _Words:
    """The mask that allows these tokens alone."""
    bits = np.zeros(32 * num_words, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
