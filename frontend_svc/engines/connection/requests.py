"""Requests of this frontend in one engine, from their ADD to their end. Knows no state of the engine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from frontend_svc.engines.adoption.orphaned_requests import EngineAdoptions
from frontend_svc.engines.connection.columns import read_step
from frontend_svc.engines.connection.connection import INPUT_SEGMENTS, EngineConnection
from frontend_svc.engines.connection.resumable import ResumableRequests
from frontend_svc.engines.routing.account import EngineAccount
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.loss import Loss
from frontend_svc.output.pace import MAX_ROWS_A_TURN, DeliveryPace
from frontend_svc.output.processor import OutputProcessor, Receiver
from frontend_svc.tensors.sender import TensorSender
from frontend_svc.tensors.wire_tensor import WireTensor
from frontend_svc.text.tokenize.id_column import ID_BYTES
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2, step_pb2
from triptych_kit.errors import from_status

logger = logging.getLogger(__name__)


class EngineRequests:
    """Sends requests over a connection, and passes what the engine answers to their receivers.

    If the engine is lost, the receivers get a `Loss`; later outputs of the engine for them are dropped and
    counted. `on_add` is called with the engine's id after each `add`. One `pace` is for all
    engines of a process.
    """

    def __init__(
        self,
        address: str,
        frontend_id: str,
        connection: EngineConnection,
        *,
        on_add: Callable[[str], None],
        pace: DeliveryPace,
    ) -> None:
        self.account = EngineAccount(address)
        self.num_resumed = 0  # streams that continued a session
        self.stale_outputs = 0  # rows of requests that had moved to other engines
        self.vocab_size = 0  # of the engine's model; 0 until it is known
        self._connection = connection
        self._on_add = on_add
        self._pace = pace
        self._handles = itertools.count(1)
        self._processor = OutputProcessor(on_end=self._on_end)
        self.adoptions = EngineAdoptions(connection, self._processor, self._handles, self.abort)
        self._resumable = ResumableRequests()
        self._tensors = TensorSender(frontend_id, send=self._send_adds, fail=self._processor.fail)
        connection.greet = self._tensors.greet

    @property
    def num_in_flight(self) -> int:
        """Requests that the engine has not ended."""
        return len(self._processor)

    def has_room(self, num_requests: int) -> bool:
        """False if the engine would reject `num_requests` more of this session."""
        limit = self._connection.ack.max_inflight_adds
        return limit <= 0 or len(self._processor) + num_requests <= limit

    @property
    def takes_segments(self) -> bool:
        """Whether requests may be resumable."""
        return INPUT_SEGMENTS in self._connection.ack.features

    def is_idle(self, handle: int) -> bool:
        """Whether the engine keeps a request, whose turn has ended, for further input."""
        return self._resumable.is_idle(handle)

    def add(
        self,
        entries: Sequence[add_pb2.AddEntry],
        states: Sequence[Receiver],
        tensors: Collection[WireTensor] = (),
    ) -> list[int]:
        """Send requests together, with the `tensors` that they refer to by digest; returns their handles.

        The states are registered before anything is sent, so no output arrives without a receiver. Requests
        added when the stream has just ended are sent on the next one, or are lost with the engine's others.
        """
        handles: list[int] = []
        self._make_room(len(entries))
        for entry, state in zip(entries, states, strict=True):
            handle = next(self._handles) & 0xFFFFFFFF
            self._processor.register(handle, state)
            # They have the same prompt, which is computed for the first of them only.
            self.account.send(handle, 0 if handles else _num_pending_tokens(entry))
            entry.handle = handle
            handles.append(handle)
            if not self.adoptions.are_possible:
                # What belongs to a feature is not used at an engine without it.
                entry.ClearField("resume_state")
                entry.ClearField("orphan_grace_ms")
            if not self.takes_segments:
                entry.ClearField("resumable")
            if entry.resumable:
                self._resumable.send(entry)
        if tensors:
            self._tensors.send(entries, tensors, self._connection.stub)
        else:
            self._send_adds(entries)
        self._on_add(self._connection.ack.engine_id)
        return handles

    def extend(self, entry: add_pb2.AddEntry, state: Receiver, on_gone: Callable[[], None]) -> None:
        """Begin the next turn of an idle request.

        `on_gone` is called instead of its receiver if the engine has ended the request before this turn.
        """
        self._processor.register(entry.handle, state)
        self._resumable.send(entry, on_gone)
        self.account.send(entry.handle, _num_pending_tokens(entry))
        self._send_adds([entry])
        self._on_add(self._connection.ack.engine_id)

    def cancel_turn(self, handle: int, segment: int) -> None:
        """Have the next token be the last of a turn."""
        cancel = self._connection.session.cancel_turn(handle, segment)
        self._connection.send(engine_pb2.ConnectRequest(cancel_turn=cancel))

    def close(self, handle: int) -> None:
        """End a request that waits for input. Without effect on any other."""
        entry = self._resumable.close(handle)
        if entry is not None:
            self._send_adds([entry])

    def abort(self, handles: Iterable[int], reason: engine_pb2.AbortReason) -> None:
        """Abort requests in the engine and forget them here; those that have ended are skipped."""
        running = [handle for handle in handles if self._processor.forget(handle)]
        if running:
            self._send_abort(running, reason)

    def end(self, handles: Iterable[int]) -> None:
        """Abort requests in the engine and end them for their readers; those that have ended are skipped."""
        running = [handle for handle in handles if self._processor.end(handle, Ending(EndReason.ABORT))]
        if running:
            self._send_abort(running, engine_pb2.ABORT_REASON_CLIENT)

    def hint(self, handle: int, hint: session_pb2.FinishHint) -> None:
        """Send what an output that has ended calls. Without a stream it is of no use."""
        hint.handle = handle
        self._connection.send(engine_pb2.ConnectRequest(finish_hint=hint))

    async def on_step(self, step: step_pb2.Step) -> None:
        """Pass a step to its readers, a few at a time: all of them at once would block the event loop."""
        columns = read_step(step, self.vocab_size)
        self.stale_outputs += self._connection.session.on_step(columns)
        for row in columns.cached:
            self.account.begin(columns.handles[row])
            self._resumable.begin(columns.handles[row])
        for row, ending in columns.endings.items():
            self._note_end(columns.handles[row], ending)
        for rows in columns.slices(MAX_ROWS_A_TURN):
            await self._pace.take(rows.cost)
            finished_here = self._processor.process(rows)
            if finished_here:
                self._send_abort(finished_here, engine_pb2.ABORT_REASON_STOP_STRING)

    def on_rejected(self, rejected: engine_pb2.AddRejected) -> None:
        status = rejected.status
        error = from_status(status.code, status.message, status.details, rejected.retry_after_ms or None)
        self._connection.session.on_finished([rejected.handle])
        self._end_resumable(rejected.handle)
        self._processor.fail(rejected.handle, error)
        self.adoptions.on_rejected(rejected.handle, error)

    def on_adopted(self, adopted: engine_pb2.Adopted) -> None:
        self.account.send(adopted.handle, 0)
        self.adoptions.on_adopted(adopted)

    def on_resumed(self) -> None:
        """The session continues on another stream: send what waits for an upload again."""
        self.num_resumed += 1
        self._tensors.go_on(self._connection.stub)

    def lose(self, loss: Loss) -> None:
        """The engine is lost, and with it the requests it has of this frontend."""
        self.account.reset()
        self._tensors.stop()
        self._resumable.clear()
        self.adoptions.lose(loss.reason)
        while len(self._processor):
            try:
                self._processor.lose_all(loss)
            except Exception:
                # A bug in this frontend that concerns one request. It is forgotten; the others get the loss.
                logger.exception("a request failed to handle a lost engine", extra={"engine": loss.address})

    def _make_room(self, num_requests: int) -> None:
        """Let requests that wait for input give way to others."""
        limit = self._connection.ack.max_inflight_adds
        num_open = len(self._processor) + self._resumable.num_idle
        if 0 < limit < num_open + num_requests:
            self._send_adds(list(self._resumable.close_oldest(num_open + num_requests - limit)))

    def _note_end(self, handle: int, ending: Ending) -> None:
        if handle not in self._resumable:
            return
        if not ending.turn_ended:
            self._end_resumable(handle)
        elif handle in self._processor:
            self._resumable.end_turn(handle)

    def _end_resumable(self, handle: int) -> None:
        on_gone = self._resumable.end(handle)
        # Nothing of this end reaches a receiver, as that of a turn that goes on elsewhere.
        if on_gone is not None and self._processor.forget(handle):
            on_gone()

    def _send_adds(self, entries: Sequence[add_pb2.AddEntry]) -> None:
        for message in self._connection.session.add(entries):
            self._connection.send(message)

    def _send_abort(self, handles: list[int], reason: engine_pb2.AbortReason) -> None:
        # Without a stream only the session records it, and the next stream sends it.
        abort = self._connection.session.abort(handles, reason)
        if abort is not None:
            self._connection.send(engine_pb2.ConnectRequest(abort=abort))

    def _on_end(self, handle: int) -> None:
        self.account.end(handle)
        self._tensors.forget(handle)


def _num_pending_tokens(entry: add_pb2.AddEntry) -> int:
    """Prompt and output tokens that the engine has to compute before the request's next token."""
    return (len(entry.prompt_token_ids) + len(entry.output_token_ids)) // ID_BYTES
