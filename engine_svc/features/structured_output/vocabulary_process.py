"""A process that reads a large vocabulary for llguidance, and tokenizes texts for it.

Reading 262,144 tokens with their merges takes four seconds, in which llguidance lets no other thread of
Python run: an engine would send no heartbeats. Of the tokens alone it makes its own tokenizer in two pauses
of under a second, and asks the process for the tokens that a text is written with.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from array import array

from engine_svc.core.errors import RequestFailed
from engine_svc.features.structured_output.backends.backend import Vocabulary
from engine_svc.features.structured_output.grammar_worker import receive, send
from triptych_kit.process.child import Child
from triptych_kit.process.setup import importing_environment, release_memory, set_title

_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 10.0
_NICENESS = 5
_END_WAIT_S = 1.0
_COMMAND = (sys.executable, "-P", "-m", "engine_svc.features.structured_output.vocabulary_process")
_MAX_KNOWN = 1 << 16  # texts
_MAX_KNOWN_BYTES = 256  # of one


class VocabularyProcess:
    """What llguidance needs of a tokenizer, by another process. For several threads.

    tokens: bytes of each token, also of markers.  special_token_ids: of tokens that no text is written with.
    marker_ids: of those that grammars may name, by their texts.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        self.marker_ids: dict[str, int] = {}
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False
        # Of texts that schemas force, the same ones come again and again.
        self._known: dict[bytes, list[int]] = {}

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process, and read the tokens. Raises RequestFailed, ValueError for what is refused."""
        with self._lock:
            self._connected()

    def __call__(self, text: bytes) -> list[int]:
        """The tokens that the tokenizer writes the text with."""
        token_ids = self._known.get(text)
        if token_ids is None:
            token_ids = array("I", self._asked(text)).tolist()
            if len(text) <= _MAX_KNOWN_BYTES:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[text] = token_ids
        return token_ids

    def close(self) -> None:
        """End the process, also while it starts."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
        with self._lock:
            self._end()

    def _asked(self, text: bytes) -> bytes:
        with self._lock:
            for is_last in (False, True):
                connection = self._connected()
                try:
                    connection.settimeout(_ANSWER_LIMIT_S)
                    send(connection, text)
                    return receive(connection)
                except (OSError, EOFError):
                    # It was ended from outside: another continues in its place.
                    self._end()
                    if is_last:
                        raise
        raise AssertionError("the loop ends by an answer or an error")

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        if self._is_closed:
            raise RequestFailed("UNAVAILABLE", "the engine ends")
        self._socket, theirs = socket.socketpair()
        with theirs:
            environment = importing_environment()
            self._child = Child("vocabulary", _COMMAND, environment, stdin=theirs, stdout=theirs)
        vocabulary = self._vocabulary
        setup = [vocabulary.tokenizer_json, vocabulary.size, vocabulary.eos_ids]
        try:
            self._socket.settimeout(_START_LIMIT_S)
            send(self._socket, json.dumps(setup).encode())
            answer = json.loads(receive(self._socket))
            if "refused" in answer:
                raise ValueError(answer["refused"])
            lengths, content = array("I", receive(self._socket)), receive(self._socket)
        except (OSError, EOFError) as error:
            self._end()
            raise RequestFailed(
                "UNAVAILABLE", "the process that reads the vocabulary cannot be started"
            ) from error
        except ValueError:
            self._end()
            raise
        self.special_token_ids, self.marker_ids = answer["special_ids"], answer["marker_ids"]
        self.tokens, first = [], 0
        for length in lengths:
            self.tokens.append(content[first : first + length])
            first += length
        return self._socket

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        child, self._socket, self._child = self._child, None, None
        if child is not None and not child.join(0):
            child.kill()
            child.join(_END_WAIT_S)


def main() -> int:
    """Answer texts until the engine closes the connection, or has ended."""
    from llguidance import LLTokenizer

    from engine_svc.features.structured_output.llguidance_text import with_markers_apart

    set_title("vocabulary")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)
    try:
        tokenizer_json, size, eos_ids = json.loads(receive(connection))
        try:
            text, marker_ids = with_markers_apart(tokenizer_json)
            tokenizer = LLTokenizer(text, n_vocab=size, eos_token=eos_ids, slices=[])
        except (ValueError, RuntimeError, KeyError) as error:
            send(connection, json.dumps({"refused": str(error)}).encode())
            return 0
        del tokenizer_json, text
        tokens = [_bytes_of(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)]
        special_ids = [
            token_id
            for token_id, content in enumerate(tokens)
            if content and tokenizer.is_special_token(token_id)
        ]
        send(connection, json.dumps({"special_ids": special_ids, "marker_ids": marker_ids}).encode())
        send(connection, array("I", map(len, tokens)).tobytes())
        send(connection, b"".join(tokens))
        del tokens
        release_memory()
        while True:
            send(connection, array("I", tokenizer.tokenize_bytes(receive(connection))).tobytes())
    except (OSError, EOFError):
        return 0


def _bytes_of(tokenizer: object, token_id: int) -> bytes:
    """Of a special token its text; b"" where the vocabulary has no token of this id."""
    content: bytes = tokenizer.decode_bytes([token_id])  # type: ignore[attr-defined]
    # What llguidance shows in place of a token without any.
    return b"" if content == b"<[%d]>" % token_id else content


if __name__ == "__main__":
    raise SystemExit(main())
