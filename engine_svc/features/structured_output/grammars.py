"""Grammars of a vocabulary: backends by name, and what they have compiled."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from engine_svc.core.errors import RequestFailed
from engine_svc.features.structured_output.backends.backend import (
    MAX_SMALL_CHARS,
    CompiledGrammar,
    GrammarBackend,
    Vocabulary,
)
from engine_svc.features.structured_output.extras import BACKENDS, StructuredOutput
from engine_svc.features.structured_output.grammar_worker import GrammarWorker
from triptych_kit.grammars.constraint import GrammarError, GrammarTooComplex


@dataclass(slots=True)
class Grammar:
    """A request's constraint, ready to use. compile_us: 0 if it was cached, -1 once it was reported."""

    spec: StructuredOutput
    backend: GrammarBackend
    compiled: CompiledGrammar
    compile_us: int


class Grammars:
    """Keeps the grammars that were used last, within limits. For several threads.

    The default backend is prepared at once, as that holds the interpreter for a second; others when they are
    first used.
    """

    def __init__(self, vocabulary: Vocabulary, *, num_threads: int, max_entries: int, max_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._backends: dict[str, GrammarBackend] = {}
        self._cached: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._backend(BACKENDS[0])

    def compile(self, spec: StructuredOutput) -> Grammar:
        """Raises RequestFailed. A failure is not kept: a limit that was reached says nothing of a retry."""
        backend = self._backend(spec.backend)
        digest = spec.digest
        with self._lock:
            if (cached := self._cached.get(digest)) is not None:
                self._cached.move_to_end(digest)
                return Grammar(spec, backend, cached, 0)
        began_at = time.perf_counter()
        try:
            compiled = backend.compile(spec.constraint)
        except GrammarTooComplex as error:
            raise RequestFailed("RESOURCE_EXHAUSTED", f"structured_output: {error}") from None
        except GrammarError as error:
            raise RequestFailed("INVALID_ARGUMENT", f"structured_output: {error}") from None
        compile_us = max(1, round((time.perf_counter() - began_at) * 1e6))
        self._keep(digest, compiled)
        return Grammar(spec, backend, compiled, compile_us)

    @staticmethod
    def is_slow(spec: StructuredOutput) -> bool:
        """Whether another process has to compile it first, which may be busy with others."""
        return spec.backend != BACKENDS[0] or spec.constraint.num_chars > MAX_SMALL_CHARS

    def _keep(self, digest: bytes, compiled: CompiledGrammar) -> None:
        with self._lock:
            # Another thread may have compiled the same.
            if digest not in self._cached:
                self._cached[digest] = compiled
                self._num_bytes += compiled.size_bytes
            while len(self._cached) > self._max_entries or self._num_bytes > self._max_bytes:
                _, evicted = self._cached.popitem(last=False)
                self._num_bytes -= evicted.size_bytes

    def _backend(self, name: str) -> GrammarBackend:
        with self._lock:
            if name not in self._backends:
                self._backends[name] = _make_backend(name, self._vocabulary, self._num_threads)
            return self._backends[name]


def _make_backend(name: str, vocabulary: Vocabulary, num_threads: int) -> GrammarBackend:
    """Raises RequestFailed if the backend cannot read the vocabulary."""
    try:
        if name == "xgrammar":
            from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend

            return XGrammarBackend(vocabulary, num_threads, GrammarWorker(name, vocabulary, {}).check)
        from engine_svc.features.structured_output.backends.llguidance_backend import (
            LLGuidanceBackend,
            marker_ids,
        )

        worker = GrammarWorker(name, vocabulary, marker_ids(vocabulary.tokenizer_json))
        return LLGuidanceBackend(vocabulary, num_threads, worker.check)
    except (ImportError, ValueError, RuntimeError, KeyError) as error:
        raise RequestFailed(
            "UNIMPLEMENTED", f"structured_output: {name} cannot be used with this model: {error}"
        ) from error
