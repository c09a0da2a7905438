"""A process that rewrites constraints, and compiles large ones before their engine does, and can be killed.

Nothing limits the work of rewriting or of xgrammar, and fuel not all of llguidance. Work that takes too
long or too much memory ends here; the process has a lower priority than the steps. Its program is this file's
`main`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from engine_svc.core.binary_form import form_of
from engine_svc.core.errors import RequestFailed
from engine_svc.features.structured_output.backends.backend import MAX_SMALL_CHARS, Vocabulary
from engine_svc.features.structured_output.check import (
    TOO_COMPLEX,
    ConstraintRefused,
    WrittenConstraint,
    check,
)
from engine_svc.features.structured_output.constraint import Constraint, GrammarError
from engine_svc.features.structured_output.extras import StructuredOutput
from triptych_kit.process.child import Child
from triptych_kit.process.setup import importing_environment, release_memory, set_title

CPU_LIMIT_S = 2.0  # to rewrite one constraint, and again to compile it
MEMORY_LIMIT = 256 << 20
_WALL_LIMIT_S = 5.0  # less than the engine waits for a request's preparation
_START_LIMIT_S = 60.0
_NICENESS = 5
_END_WAIT_S = 1.0
_LENGTH = struct.Struct("<I")
# Not one that dies with its parent: the kernel means the thread that started it, which may be left behind.
_COMMAND = (sys.executable, "-P", "-m", "engine_svc.features.structured_output.grammar_worker")
_DATA_FIELD = 5  # of /proc/self/statm, in pages
_MANY_BYTES = 16 << 20
_FORM = form_of(StructuredOutput)
_TOKEN_IDS = re.compile(r"<\[\^?[0-9,-]+\]>")  # in a grammar


class GrammarWorker:
    """One process, started at first use and again after it was killed. For several threads, one at a time."""

    def __init__(self, backend: str, vocabulary: Vocabulary, special_ids: dict[str, int]) -> None:
        """backend: xgrammar for a process that compiles with it, which needs the vocabulary. Any other has
        llguidance, which needs of it only special_ids, and writes for xgrammar without compiling.
        """
        needed = vocabulary if backend == "xgrammar" else Vocabulary("", 0, ())
        self._setup = json.dumps([backend, dataclasses.astuple(needed), special_ids]).encode()
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._socket: socket.socket | None = None

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    def check(self, spec: StructuredOutput) -> WrittenConstraint:
        """Raises ConstraintRefused, RequestFailed."""
        name = spec.constraint.kind.value
        with self._lock:
            connection = self._connected()
            try:
                connection.settimeout(_WALL_LIMIT_S)
                send(connection, _FORM.encode(spec))
                answer = json.loads(receive(connection))
            except TimeoutError:
                self._kill()
                message = f"{name} took longer than {_WALL_LIMIT_S:g} s to compile"
                raise ConstraintRefused(message, TOO_COMPLEX) from None
            except (OSError, EOFError):
                raise ConstraintRefused(f"{name} {self._kill()}", TOO_COMPLEX) from None
        if "refused" in answer:
            raise ConstraintRefused(answer["refused"], answer["reason"])
        rewritten = dataclasses.replace(
            spec.constraint, text=answer["text"], has_additional_properties=True, is_lenient=False
        )
        return WrittenConstraint(answer["backend"], rewritten, answer["grammar"])

    def close(self) -> None:
        """End the process; its constraint is refused."""
        if self._child is not None:
            self._child.kill()
        with self._lock:
            self._kill()

    def _connected(self) -> socket.socket:
        if self._child is not None and self._child.is_running and self._socket is not None:
            return self._socket
        self._kill()
        self._socket, theirs = socket.socketpair()
        with theirs:
            environment = importing_environment()
            self._child = Child("grammar-worker", _COMMAND, environment, stdin=theirs, stdout=theirs)
        try:
            self._socket.settimeout(_START_LIMIT_S)
            send(self._socket, self._setup)
            receive(self._socket)
        except (OSError, EOFError) as error:
            self._kill()
            raise RequestFailed(
                "UNAVAILABLE", "the process that compiles grammars cannot be started"
            ) from error
        return self._socket

    def _kill(self) -> str:
        """End the process; returns the cause in words, for the refusal of its constraint."""
        if self._socket is not None:
            self._socket.close()
        child, self._socket, self._child = self._child, None, None
        if child is None:
            return ""
        # It may be about to end by a limit.
        if not child.join(_END_WAIT_S):
            child.kill()
            child.join(_END_WAIT_S)
        if child.exit_code == -signal.SIGPROF:
            return f"took more than {CPU_LIMIT_S:g} s of CPU time to compile"
        if child.exit_code == -signal.SIGABRT:
            return f"took more than {MEMORY_LIMIT >> 20} MiB to compile"
        return f"ended the process that compiled it, which {child.how_it_ended}"


def send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes:
    """Raises EOFError where the other end has closed."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        data = connection.recv(num_bytes - len(content))
        if not data:
            raise EOFError
        content += data
    return bytes(content)


def main() -> int:
    """Answer constraints until the engine closes the connection, or has ended."""
    set_title("grammar-worker")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)
    try:
        work = _work(receive(connection))
        send(connection, b"")
        while True:
            spec = _FORM.decode(receive(connection))
            before = _data_bytes()
            _set_limits()
            try:
                written = work(spec)
                answer = {
                    "backend": written.backend,
                    "text": written.constraint.text if written.backend == "xgrammar" else "",
                    "grammar": written.grammar,
                }
            except GrammarError as error:
                refused = ConstraintRefused.of(error)
                answer = {"refused": str(refused), "reason": refused.reason}
            except ConstraintRefused as refused:
                answer = {"refused": str(refused), "reason": refused.reason}
            except (MemoryError, RecursionError) as error:
                message = str(error) or f"it takes more than {MEMORY_LIMIT >> 20} MiB to compile"
                answer = {"refused": message, "reason": TOO_COMPLEX}
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(connection, json.dumps(answer).encode())
            if _data_bytes() > before + _MANY_BYTES:
                release_memory()
    except (OSError, EOFError):
        return 0


def _work(setup: bytes) -> Callable[[StructuredOutput], WrittenConstraint]:
    backend, (tokenizer_json, size, eos_ids), special_ids = json.loads(setup)
    if backend == "xgrammar":
        from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend

        compiler = XGrammarBackend(Vocabulary(tokenizer_json, size, tuple(eos_ids)))

        def compile_here(spec: StructuredOutput) -> WrittenConstraint:
            compiler.compile(spec.constraint)
            return WrittenConstraint(backend, spec.constraint)

        return compile_here
    from llguidance import LLMatcher, LLTokenizer

    from engine_svc.features.structured_output.llguidance_text import (
        grammar_error,
        grammar_text,
        parser_limits,
    )

    bytes_alone = LLTokenizer("byte")

    def write(backend: str, constraint: Constraint, is_last: bool) -> str:
        if backend == "xgrammar":
            return ""
        grammar = grammar_text(constraint, special_ids)
        if is_last and constraint.num_chars <= MAX_SMALL_CHARS:
            # Fuel and other limits end the engine's own work after some 10 ms.
            return grammar
        _set_limits()
        # The cost depends on the grammar, not on the tokens: the engine's own takes about as long.
        matcher = LLMatcher(
            bytes_alone, _TOKEN_IDS.sub("<[0]>", grammar), log_level=0, limits=parser_limits()
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise grammar_error(constraint, matcher.get_error())
        return grammar

    return lambda spec: check(spec.constraint, spec.backends, write)


def _set_limits() -> None:
    """For what follows: the kernel ends the process at the first, and refuses memory at the second."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY_LIMIT, hard))


def _data_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[_DATA_FIELD]) * resource.getpagesize()


if __name__ == "__main__":
    raise SystemExit(main())
