"""Grammars of a vocabulary: backends by name, and a cache of their results."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from engine_svc.core.errors import RequestFailed
from engine_svc.features.structured_output.backends.backend import (
    MAX_SMALL_CHARS,
    CompiledGrammar,
    GrammarBackend,
    Vocabulary,
)
from engine_svc.features.structured_output.check import TOO_COMPLEX, ConstraintRefused, WrittenConstraint
from engine_svc.features.structured_output.constraint import ConstraintKind, GrammarError
from engine_svc.features.structured_output.extras import BACKENDS, StructuredOutput
from engine_svc.features.structured_output.grammar_worker import GrammarWorker
from engine_svc.features.structured_output.vocabulary_process import VocabularyProcess

_FIELD = "sampling.structured_output"  # of the ADD
# Kinds with schemas, which are rewritten.
_REWRITTEN = (ConstraintKind.JSON_SCHEMA, ConstraintKind.STRUCTURAL_TAG)
_REFUSAL_BYTES = 512  # beside its message
# Of the tokenizer's file, with some 40,000 tokens: others are read in another process.
MAX_QUICK_CHARS = 2 << 20

_Compiled: TypeAlias = tuple[GrammarBackend, CompiledGrammar]


@dataclass(slots=True)
class Grammar:
    """A request's constraint, ready to use. compile_us: 0 if it was cached, -1 once it was reported."""

    spec: StructuredOutput
    backend: GrammarBackend
    compiled: CompiledGrammar
    compile_us: int


class Grammars:
    """Cache of the grammars that were used last, and of lasting refusals, within limits.

    For several threads. Backends are prepared when they are first used, but for the default one with a small
    vocabulary: that is prepared at once, as it holds the interpreter for a moment.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        num_threads: int,
        max_entries: int,
        max_bytes: int,
        max_quick_chars: int = MAX_QUICK_CHARS,
    ) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._making = threading.Lock()  # of a backend
        self._backends: dict[str, GrammarBackend] = {}
        self._failures: dict[str, str] = {}  # why backends cannot be used
        self._processes: list[GrammarWorker | VocabularyProcess] = []
        self._writers: list[GrammarWorker] = []
        self._is_quick = len(vocabulary.tokenizer_json) <= max_quick_chars
        self._cached: OrderedDict[bytes, _Compiled | ConstraintRefused] = OrderedDict()
        self._num_bytes = 0
        if self._is_quick:
            self._backend(BACKENDS[0])

    def compile(self, spec: StructuredOutput) -> Grammar:
        """Raises RequestFailed. A limit that was reached says nothing of a retry, so that is not kept."""
        digest = spec.digest
        with self._lock:
            cached = self._cached.get(digest)
            if cached is not None:
                self._cached.move_to_end(digest)
        if isinstance(cached, ConstraintRefused):
            raise _failed(cached)
        if cached is not None:
            return Grammar(spec, *cached, 0)
        began_at = time.perf_counter()
        try:
            written = self._written(spec)
            backend = self._backend(written.backend)
            compiled = backend.compile(written.constraint, written.grammar)
        except (GrammarError, ConstraintRefused) as error:
            refused = ConstraintRefused.of(error) if isinstance(error, GrammarError) else error
            if refused.reason != TOO_COMPLEX:
                self._keep(digest, refused)
            raise _failed(refused) from None
        compile_us = max(1, round((time.perf_counter() - began_at) * 1e6))
        self._keep(digest, (backend, compiled))
        return Grammar(spec, backend, compiled, compile_us)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    @staticmethod
    def is_slow(spec: StructuredOutput) -> bool:
        """Whether it may take long, in another process or before that has answered others."""
        return spec.backends[0] != BACKENDS[0] or spec.constraint.num_chars > MAX_SMALL_CHARS

    def _written(self, spec: StructuredOutput) -> WrittenConstraint:
        """The constraint for a backend, by another process if that may be much work."""
        is_slow, backend = self.is_slow(spec), spec.backends[0]
        if spec.constraint.kind in _REWRITTEN or (is_slow and backend == BACKENDS[0]):
            return self._writer(is_slow).check(spec)
        return WrittenConstraint(backend, spec.constraint)

    def _writer(self, is_slow: bool) -> GrammarWorker:
        """The one for small or large constraints; the other where that is busy and the other is not.

        So the writer of large ones keeps none waiting that is prepared in the thread of quick ones.
        """
        special_ids = self._backend(BACKENDS[0]).special_ids
        with self._lock:
            if not self._writers:
                # One for small constraints, which then do not wait for large ones.
                self._writers = [self._worker(BACKENDS[0], special_ids) for _ in range(2)]
        own, other = self._writers[is_slow], self._writers[not is_slow]
        return other if own.is_busy and not other.is_busy else own

    def _keep(self, digest: bytes, entry: _Compiled | ConstraintRefused) -> None:
        with self._lock:
            # Another thread may have compiled the same.
            if digest not in self._cached:
                self._cached[digest] = entry
                self._num_bytes += _size_of(entry)
            while len(self._cached) > self._max_entries or self._num_bytes > self._max_bytes:
                _, evicted = self._cached.popitem(last=False)
                self._num_bytes -= _size_of(evicted)

    def _backend(self, name: str) -> GrammarBackend:
        """Raises RequestFailed."""
        backend = self._backends.get(name)
        if backend is not None:
            return backend
        with self._making:
            if name in self._failures:
                raise RequestFailed("UNIMPLEMENTED", self._failures[name])
            if name not in self._backends:
                self._backends[name] = self._make_backend(name)
            return self._backends[name]

    def _make_backend(self, name: str) -> GrammarBackend:
        """Raises RequestFailed if the backend cannot read the vocabulary."""
        try:
            if name == "xgrammar":
                from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend

                worker = self._worker(name, {})
                return XGrammarBackend(
                    self._vocabulary,
                    self._num_threads,
                    lambda constraint: worker.check(StructuredOutput(constraint, (name,))),
                )
            from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend

            if self._is_quick:
                return LLGuidanceBackend(self._vocabulary, self._num_threads)
            process = VocabularyProcess(self._vocabulary)
            self._processes.append(process)
            process.start()
            backend = LLGuidanceBackend(self._vocabulary, self._num_threads, process)
            # llguidance has copied them.
            process.tokens.clear()
            return backend
        except (ImportError, ValueError, RuntimeError, KeyError) as error:
            self._failures[name] = f"structured_output: {name} cannot be used with this model: {error}"
            raise RequestFailed("UNIMPLEMENTED", self._failures[name]) from error

    def _worker(self, backend: str, special_ids: dict[str, int]) -> GrammarWorker:
        worker = GrammarWorker(backend, self._vocabulary, special_ids)
        self._processes.append(worker)
        return worker


def _size_of(entry: _Compiled | ConstraintRefused) -> int:
    if isinstance(entry, ConstraintRefused):
        return _REFUSAL_BYTES + len(str(entry))
    return entry[1].size_bytes


def _failed(refused: ConstraintRefused) -> RequestFailed:
    return RequestFailed("INVALID_ARGUMENT", str(refused), refused.reason, _FIELD)
