"""State of a session that is kept across streams: its id, how far it was read, what may have to be resent.

Knows no stream and no client of a request.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from frontend_svc.output.processor import StepColumns
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2

# Large enough that a usual session is one message; an engine may take less.
_MAX_FRAME_BYTES = 16 * 1024 * 1024
# Of an entry in its message, and of the message itself.
_OVERHEAD_BYTES = 16


@dataclass(slots=True)
class _OpenRequest:
    """A request that the engine has not ended."""

    attempt: int
    entry: add_pb2.AddEntry | None  # until the engine has certainly received it
    adopt: engine_pb2.AdoptEntry | None = None  # until the engine has answered it
    abort_reason: engine_pb2.AbortReason | None = None
    cancel: engine_pb2.CancelTurn | None = None
    is_moved: bool = False


class EngineSession:
    """One session with an engine process, over any number of streams.

    `add`, `adopt` and `abort` record what is sent, the `on_` methods what is received.
    """

    def __init__(self, session_id: str = "") -> None:
        self.session_id = session_id or secrets.token_hex(16)
        self.engine_epoch = 0
        self.is_resumable = False
        self.last_seq = 0
        self._max_frame_bytes = _MAX_FRAME_BYTES
        self._open: dict[int, _OpenRequest] = {}
        self._num_moved = 0

    @property
    def num_moved(self) -> int:
        """Requests that were sent to other engines, and that this engine has not ended."""
        return self._num_moved

    def open(self, engine_epoch: int, *, is_resumable: bool, max_frame_bytes: int) -> None:
        """Note that the engine has accepted the session as a new one.

        max_frame_bytes: what it takes in a message; 0 if it does not say.
        """
        self.engine_epoch = engine_epoch
        self.is_resumable = is_resumable
        self._max_frame_bytes = min(max_frame_bytes or _MAX_FRAME_BYTES, _MAX_FRAME_BYTES)

    def resume_point(self) -> session_pb2.ResumePoint | None:
        """From where another stream resumes it; None if it cannot be resumed."""
        if not self.is_resumable:
            return None
        return session_pb2.ResumePoint(engine_epoch=self.engine_epoch, last_seq=self.last_seq)

    def is_resumed_by(self, ack: session_pb2.HelloAck) -> bool:
        """Whether the engine that answered is the same process and resumes the session."""
        return self.is_resumable and ack.resume_ok and ack.engine_epoch == self.engine_epoch

    def add(self, entries: Iterable[add_pb2.AddEntry]) -> Iterator[engine_pb2.ConnectRequest]:
        """Record requests, and return the messages that send them."""
        entries = list(entries)
        for entry in entries:
            self._open[entry.handle] = _OpenRequest(entry.attempt, entry)
        return self._in_messages(entries)

    def adopt(self, entry: engine_pb2.AdoptEntry) -> None:
        """Record a request that the engine is asked to hand over."""
        self._open[entry.handle] = _OpenRequest(0, None, adopt=entry)

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> engine_pb2.Abort | None:
        """The message that ends requests; None if the engine has ended them all."""
        abort = engine_pb2.Abort(reason=reason)
        for handle in handles:
            request = self._open.get(handle)
            if request is not None:
                request.abort_reason = request.abort_reason or reason
                abort.handles.append(handle)
                abort.attempts.append(request.attempt)
        return abort if abort.handles else None

    def cancel_turn(self, handle: int, segment: int) -> engine_pb2.CancelTurn:
        """The message that ends the turn of a resumable request with its next token."""
        cancel = engine_pb2.CancelTurn(handle=handle, segment=segment)
        if handle in self._open:
            self._open[handle].cancel = cancel
        return cancel

    def on_adopted(self, handle: int, attempt: int) -> None:
        """The engine has handed over a request: from here on it is like one that was sent."""
        request = self._open.get(handle)
        if request is not None:
            request.attempt, request.adopt = attempt, None

    def on_step(self, columns: StepColumns) -> int:
        """Record what a step answers; returns how many of its rows belong to moved requests."""
        num_stale = 0
        if self._num_moved:
            num_stale = sum(self._has_moved(handle) for handle in columns.handles)
        for row in columns.cached:
            request = self._open.get(columns.handles[row])
            if request is not None:
                request.entry = None
        for row, ending in columns.endings.items():
            handle = columns.handles[row]
            if not ending.turn_ended:
                self.on_finished([handle])
            elif (request := self._open.get(handle)) is not None:
                request.entry = request.cancel = None
        return num_stale

    def on_finished(self, handles: Iterable[int]) -> None:
        """The engine has ended these requests."""
        for handle in handles:
            request = self._open.pop(handle, None)
            if request is not None:
                self._num_moved -= request.is_moved

    def mark_moved(self) -> None:
        """All open requests are sent to other engines: outputs of this engine for them are dropped."""
        for request in self._open.values():
            request.is_moved = True
            request.abort_reason = request.abort_reason or engine_pb2.ABORT_REASON_MIGRATED
        self._num_moved = len(self._open)

    def unanswered(self) -> Iterator[engine_pb2.ConnectRequest]:
        """The first messages of another stream. The engine ignores an ADD or an abort that it has already.

        An aborted ADD is sent as well: without it the engine would not answer its abort.
        """
        entries = [request.entry for request in self._open.values() if request.entry is not None]
        yield from self._in_messages(entries)
        adopts = [request.adopt for request in self._open.values() if request.adopt is not None]
        if adopts:
            yield engine_pb2.ConnectRequest(adopt=engine_pb2.Adopt(entries=adopts))
        for request in self._open.values():
            if request.cancel is not None:
                yield engine_pb2.ConnectRequest(cancel_turn=request.cancel)
        by_reason: dict[engine_pb2.AbortReason, list[int]] = {}
        for handle, request in self._open.items():
            if request.abort_reason is not None:
                by_reason.setdefault(request.abort_reason, []).append(handle)
        for reason, handles in by_reason.items():
            yield engine_pb2.ConnectRequest(abort=self.abort(handles, reason))

    def _has_moved(self, handle: int) -> bool:
        request = self._open.get(handle)
        return request is not None and request.is_moved

    def _in_messages(self, entries: Sequence[add_pb2.AddEntry]) -> Iterator[engine_pb2.ConnectRequest]:
        """As few messages as the limit of their size allows."""
        message = engine_pb2.ConnectRequest()
        num_bytes = 0
        for entry in entries:
            size = entry.ByteSize() + _OVERHEAD_BYTES
            if num_bytes and num_bytes + size > self._max_frame_bytes:
                yield message
                message, num_bytes = engine_pb2.ConnectRequest(), 0
            message.add.entries.append(entry)
            num_bytes += size
        if num_bytes:
            yield message
