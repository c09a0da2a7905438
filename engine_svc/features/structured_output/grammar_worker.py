"""A process that compiles constraints before their engine does, and can be killed.

Fuel does not limit all work of llguidance, and none of xgrammar. What takes too long or too much memory ends
here; the process has a lower priority than the steps. Its program is this file's `main`.
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

from engine_svc.core.errors import RequestFailed
from engine_svc.features.structured_output.backends.backend import Vocabulary
from engine_svc.features.structured_output.extras import CONSTRAINT_FORM
from triptych_kit.grammars.constraint import Constraint, GrammarError, GrammarTooComplex
from triptych_kit.process.child import Child
from triptych_kit.process.setup import importing_environment, release_memory, set_title

CPU_LIMIT_S = 2.0  # of one constraint
MEMORY_LIMIT = 256 << 20
_WALL_LIMIT_S = 5.0  # less than the engine waits for a request's preparation
_START_LIMIT_S = 60.0
_NICENESS = 5
_END_WAIT_S = 1.0
_LENGTH = struct.Struct("<I")
# Not one that dies with its parent: the kernel means the thread that started it, which may be left behind.
_COMMAND = (sys.executable, "-P", "-m", "engine_svc.features.structured_output.grammar_worker")
_DATA_FIELD = 5  # of /proc/self/statm, in pages
_TOKEN_IDS = re.compile(r"<\[\^?[0-9,-]+\]>")  # in a grammar


class GrammarWorker:
    """One process, started at first use and again after it was killed. For several threads, one at a time."""

    def __init__(self, backend: str, vocabulary: Vocabulary, special_ids: dict[str, int]) -> None:
        """special_ids: of llguidance, which needs no more of the vocabulary; xgrammar needs all else."""
        needed = vocabulary if backend == "xgrammar" else Vocabulary("", 0, ())
        self._setup = json.dumps([backend, dataclasses.astuple(needed), special_ids]).encode()
        self._backend = backend
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._socket: socket.socket | None = None

    def check(self, constraint: Constraint) -> str:
        """The grammar in llguidance's own form, "" for xgrammar. Raises GrammarError, RequestFailed."""
        name = constraint.kind.value
        with self._lock:
            connection = self._connected()
            try:
                connection.settimeout(_WALL_LIMIT_S)
                _send(connection, CONSTRAINT_FORM.encode(constraint))
                failure, text = json.loads(_receive(connection))
            except TimeoutError:
                self._kill()
                limit = f"{_WALL_LIMIT_S:g} s"
                raise GrammarTooComplex(f"{name} took longer than {limit} to compile") from None
            except (OSError, EOFError):
                raise GrammarTooComplex(f"{name} {self._kill()}") from None
        if failure:
            raise (GrammarTooComplex if failure == "too_complex" else GrammarError)(text)
        return str(text)

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
            _send(self._socket, self._setup)
            _receive(self._socket)
        except (OSError, EOFError) as error:
            self._kill()
            raise RequestFailed(
                "UNAVAILABLE", "the process that compiles grammars cannot be started"
            ) from error
        return self._socket

    def _kill(self) -> str:
        """End the process; returns what its end says of the constraint that it had."""
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


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> bytes:
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
        compiles = _compiler(_receive(connection))
        _send(connection, b"")
        while True:
            constraint = CONSTRAINT_FORM.decode(_receive(connection))
            try:
                _set_limits()
                answer = ["", compiles(constraint)]
            except (GrammarTooComplex, MemoryError, RecursionError) as error:
                message = str(error) or f"it takes more than {MEMORY_LIMIT >> 20} MiB to compile"
                answer = ["too_complex", message]
            except GrammarError as error:
                answer = ["invalid", str(error)]
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(connection, json.dumps(answer).encode())
            release_memory()
    except (OSError, EOFError):
        return 0


def _compiler(setup: bytes) -> Callable[[Constraint], str]:
    backend, (tokenizer_json, size, eos_ids), special_ids = json.loads(setup)
    if backend == "xgrammar":
        from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend

        compiler = XGrammarBackend(Vocabulary(tokenizer_json, size, tuple(eos_ids)))

        def compiled(constraint: Constraint) -> str:
            compiler.compile(constraint)
            return ""

        return compiled
    from llguidance import LLMatcher, LLTokenizer

    from triptych_kit.grammars.llguidance_text import grammar_error, grammar_text, parser_limits

    bytes_alone = LLTokenizer("byte")

    def written(constraint: Constraint) -> str:
        grammar = grammar_text(constraint, special_ids)
        # What costs most depends on the grammar, not on the tokens: the engine's own takes about as long.
        matcher = LLMatcher(
            bytes_alone, _TOKEN_IDS.sub("<[0]>", grammar), log_level=0, limits=parser_limits()
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise grammar_error(matcher.get_error())
        return grammar

    return written


def _set_limits() -> None:
    """Of the next constraint: the kernel ends the process at the first, and refuses memory at the second."""
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    pages = int(Path("/proc/self/statm").read_text().split()[_DATA_FIELD])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + MEMORY_LIMIT, hard))


if __name__ == "__main__":
    raise SystemExit(main())
