"""Resumable requests of one engine: those that wait for input, and the ADD that ends each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from triptych.engine.v1 import add_pb2


class ResumableRequests:
    """By handle, from the ADD that opens one to its end.

    Call `send` for each ADD, `begin` at the first output of a turn, `end_turn` and `end` when the engine has
    ended a turn or a request.
    """

    def __init__(self) -> None:
        self._last: dict[int, add_pb2.AddEntry] = {}  # the ADD that ends each behind its present turn
        self._idle: dict[int, None] = {}  # longest first
        self._on_gone: dict[int, Callable[[], None]] = {}  # of segments without output yet

    def __contains__(self, handle: int) -> bool:
        return handle in self._last

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, handle: int) -> bool:
        """Whether the engine keeps a request, whose turn has ended, for further input."""
        return handle in self._idle

    def send(self, entry: add_pb2.AddEntry, on_gone: Callable[[], None] | None = None) -> None:
        """A turn begins; `on_gone`: see `EngineRequests.extend`."""
        self._idle.pop(entry.handle, None)
        self._last[entry.handle] = add_pb2.AddEntry(
            handle=entry.handle,
            request_id=entry.request_id,
            attempt=entry.attempt,
            segment=entry.segment + 1,
        )
        if on_gone is not None:
            self._on_gone[entry.handle] = on_gone

    def begin(self, handle: int) -> None:
        self._on_gone.pop(handle, None)

    def end_turn(self, handle: int) -> None:
        """From here on it waits for input."""
        self._idle[handle] = None

    def end(self, handle: int) -> Callable[[], None] | None:
        """The engine has ended a request; returns `on_gone` if its turn had no output. Idempotent."""
        self._last.pop(handle, None)
        self._idle.pop(handle, None)
        return self._on_gone.pop(handle, None)

    def close(self, handle: int) -> add_pb2.AddEntry | None:
        """Returns the ADD that ends a request; None if it does not wait for input."""
        if handle not in self._idle:
            return None
        del self._idle[handle]
        return self._last.pop(handle)

    def close_oldest(self, num_requests: int) -> Iterator[add_pb2.AddEntry]:
        """The ADDs that end those that have waited longest."""
        for handle in list(self._idle)[: max(0, num_requests)]:
            if (entry := self.close(handle)) is not None:
                yield entry

    def clear(self) -> None:
        """The engine is lost."""
        self._last.clear()
        self._idle.clear()
        self._on_gone.clear()
