"""The requests of one session: admission, adoption, abort, and the handles they run under.

Runs on the event loop. Knows no stream: replies go to `send`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.adoption.orphaned_requests import OrphanedRequest, OrphanedRequests
from engine_svc.convert import messages
from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra
from engine_svc.loop.mailbox import Abort, Add, Adopt, CancelTurn, Extend, Note, Outbox
from engine_svc.tensors.source import TensorSource
from triptych.engine.v1 import add_pb2, engine_pb2
from triptych_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from triptych_kit.field_checks import check, unserved

logger = logging.getLogger(__name__)

MAX_INFLIGHT_ADDS = 4096
_RETRY_AFTER_MS = 1000
_MAX_LOGGED_CHARACTERS = 64
_MAX_SETTLED = 8192


class SessionRequests:
    """Requests from their ADD or adoption to their final output. Each handle ends exactly once."""

    def __init__(
        self,
        engine: ServedEngine,
        orphaned_requests: OrphanedRequests,
        *,
        number: int,
        fleet: str = "",
        is_resumable: bool,
        takes_segments: bool = False,
        outbox: Outbox,
        tensors: TensorSource,
        send: Callable[[engine_pb2.ConnectResponse], None],
    ) -> None:
        self._handles = Handles()
        self._engine = engine
        self._orphaned_requests = orphaned_requests
        self._number = number
        self._fleet = fleet
        self._is_resumable = is_resumable
        self._takes_segments = takes_segments
        self._outbox = outbox
        self._tensors = tensors
        self._send = send

    @property
    def num_in_flight(self) -> int:
        """Requests whose final output has not been written yet."""
        return len(self._handles)

    def handles(self) -> list[int]:
        """Handles of the requests in flight."""
        return list(self._handles)

    def stop_token_ids(self, handles: Iterable[int]) -> dict[int, frozenset[int]]:
        """The client's stop token ids of requests in flight, by handle."""
        return {handle: self._handles[handle].stop_token_ids for handle in handles}

    def add(self, entry: add_pb2.AddEntry) -> None:
        """Admit the request of `entry`, or send its rejection."""
        if entry.segment:
            self._extend(entry)
            return
        entry_id = (entry.request_id, entry.attempt)
        if self._is_resumable and self._handles.has_seen(entry.handle, entry_id):
            # A frontend that resumes cannot know which ADDs arrived before the break, so it repeats them.
            return
        try:
            self._accept(entry)
        except ServiceError as error:
            self._reject(entry.handle, entry_id, error)
        except Exception:
            # A bug in the engine that this request triggers must not end the session's other requests.
            logger.exception("add failed", extra={"request_id": entry.request_id[:_MAX_LOGGED_CHARACTERS]})
            self._reject(entry.handle, entry_id, Internal("internal error: the request was not taken"))

    def adopt(self, entry: engine_pb2.AdoptEntry) -> None:
        """Take over a request whose session is lost, or send its rejection."""
        if self._is_resumable and self._handles.has_seen_request(entry.handle, entry.request_id):
            return
        try:
            self._check_handle(entry.handle)
            orphan = self._orphaned_requests.adopt(entry.request_id, self._number, fleet=self._fleet)
        except ServiceError as error:
            self._reject(entry.handle, (entry.request_id, 0), error)
            return
        entry_id = (orphan.wire_id, orphan.attempt)
        in_flight = InFlight(orphan.request_id, entry_id, orphan.stop_token_ids, orphan)
        self._handles.begin(entry.handle, in_flight)
        # Queued before the engine thread gets the command, so that it is sent before any output.
        self._send(engine_pb2.ConnectResponse(adopted=orphan.adopted(entry.handle)))
        self._engine.inbox.put(Adopt(orphan.request_id, self._outbox, entry.handle))

    def cancel_turn(self, message: engine_pb2.CancelTurn) -> None:
        """End the turn of a request, unless it has ended."""
        entry = self._handles.get(message.handle)
        if entry is None or entry.opened is None or entry.is_idle:
            return
        if entry.segment == message.segment:
            self._engine.inbox.put(CancelTurn(entry.request_id))

    def end_turns(self, handles: Iterable[int]) -> None:
        """Record that the turns of these requests have ended."""
        for handle in handles:
            self._handles[handle].is_idle = True

    def take_no_segments(self) -> None:
        """Let resumable requests end with their turns, and those that wait for input at once."""
        for handle in self._handles:
            entry = self._handles[handle]
            if entry.takes_input:
                entry.takes_input = False
                self._engine.inbox.put(Extend(entry.request_id, None))

    def note(self, handle: int, note: Extra) -> None:
        """Pass on a note of the frontend about a request that has ended; once, and not of one long ago."""
        request_id = self._handles.take_ended(handle)
        if request_id:
            self._engine.inbox.put(Note(request_id, note))

    async def abort(self, abort: engine_pb2.Abort) -> None:
        """Abort requests; replies with the handles that had already finished."""
        for first in range(0, len(abort.handles), MAX_INFLIGHT_ADDS):
            if first:
                # More handles than can be in flight: other sessions must not wait for such a message.
                await asyncio.sleep(0)
            self._abort_from(abort, first)

    def end(self, handles: Iterable[int]) -> None:
        """Record that the requests of `handles` have finished."""
        for handle in handles:
            orphan = self._handles[handle].orphan
            if orphan is not None and orphan.owner == self._number:
                self._orphaned_requests.end(orphan)
            self._handles.end([handle])

    def close(self) -> int:
        """Abort what is in flight, except requests that another session may adopt or has adopted.

        Returns how many were aborted.
        """
        num_aborted = 0
        for entry in self._handles.clear():
            if entry.orphan not in self._orphaned_requests:
                self._engine.inbox.put(Abort(entry.request_id, "session_lost"))
                num_aborted += 1
        # `send` belongs to the session that owns this object: only a full collection would free the cycle.
        self._send = lambda message: None
        return num_aborted

    def _extend(self, entry: add_pb2.AddEntry) -> None:
        """Continue a request with the segment of `entry`, or end it. An invalid one ends it with an error."""
        entry_id = (entry.request_id, entry.attempt)
        if not self._handles.has_seen(entry.handle, entry_id):
            error = NotFound(
                f"handle {entry.handle} has no such request",
                resource_type="request",
                resource_name=entry.request_id[:_MAX_LOGGED_CHARACTERS],
                reason="NO_SUCH_REQUEST",
            )
            self._reject(entry.handle, entry_id, error)
            return
        request = self._handles.get(entry.handle)
        if request is None or not request.takes_input or entry.segment <= request.segment:
            # It ends or has ended, of which its last row reports; or a frontend that resumes repeats an ADD.
            return
        try:
            extend = self._extension(entry, request)
        except ServiceError as error:
            extend = Extend(request.request_id, None, failure=messages.to_failure(error))
        except Exception:
            logger.exception("segment failed", extra={"request_id": request.request_id})
            failure = RequestFailed("", "internal error: the segment was not taken")
            extend = Extend(request.request_id, None, failure=failure)
        if extend.segment is None:
            # The turn that runs stays what it is.
            request.takes_input = False
        else:
            request.segment, request.is_idle = entry.segment, False
            request.stop_token_ids = frozenset(entry.sampling.stop_token_ids)
        self._engine.inbox.put(extend)

    def _extension(self, entry: add_pb2.AddEntry, request: InFlight) -> Extend:
        """The command for an ADD of a request that takes further input. Raises ServiceError."""
        if entry.segment != request.segment + 1:
            following = f"the next one is {request.segment + 1}"
            raise InvalidArgument(f"segment is {entry.segment}, {following}", field="segment")
        if not entry.resumable:
            return Extend(request.request_id, None)
        if not request.is_idle:
            raise FailedPrecondition("the turn before has not ended", reason="TURN_NOT_ENDED")
        assert request.opened is not None, "a request that takes input is resumable"
        now = self._engine.clock.now()
        segment = messages.to_segment(entry, request.opened, **self._context(now))
        return Extend(request.request_id, segment, messages.to_deadline(entry, now))

    def _context(self, now: float) -> messages.RequestContext:
        return {
            "session_number": self._number,
            "facts": self._admitting_core().facts,
            "now": now,
            "features": self._engine.features,
            "tensors": self._tensors,
        }

    def _accept(self, entry: add_pb2.AddEntry) -> None:
        core = self._admitting_core()
        self._check_handle(entry.handle)
        self._check_entry(entry)
        if entry.resumable and not self._takes_segments:
            raise unserved("resumable")
        now = self._engine.clock.now()
        request = messages.to_request(entry, **self._context(now))
        refusal = core.refusal(request)
        if refusal is not None:
            raise InvalidArgument(refusal, reason="NEVER_FITS")
        core.prepare(request)
        deadline_at = messages.to_deadline(entry, now)
        # A resumable request ends with its session.
        keeps_outputs = not entry.resumable and self._orphaned_requests.can_keep(entry)
        if not self._engine.inbox.put(Add(request, self._outbox, entry.handle, deadline_at, keeps_outputs)):
            raise ResourceExhausted("engine's inbox is full", retry_after_ms=_RETRY_AFTER_MS)
        in_flight = InFlight(
            request.request_id,
            (entry.request_id, entry.attempt),
            frozenset(entry.sampling.stop_token_ids),
            opened=messages.to_open_request(request) if entry.resumable else None,
            takes_input=entry.resumable,
        )
        if keeps_outputs:
            in_flight.orphan = self._orphaned_requests.keep(
                entry,
                request.request_id,
                owner=self._number,
                fleet=self._fleet,
                default_grace_s=self._engine.replay_window_s,
            )
        self._handles.begin(entry.handle, in_flight)

    def _abort_from(self, abort: engine_pb2.Abort, first: int) -> None:
        late, cause = [], messages.to_abort_cause(abort.reason)
        for index, handle in enumerate(abort.handles[first : first + MAX_INFLIGHT_ADDS], start=first):
            entry = self._handles.get(handle)
            if entry is None:
                if self._handles.is_settled(handle):
                    late.append(handle)
            elif not entry.is_aborted and (
                index >= len(abort.attempts) or abort.attempts[index] == entry.attempt
            ):
                entry.is_aborted = True
                orphan = entry.orphan
                if orphan is not None and orphan.owner != self._number:
                    continue  # Another session has adopted it.
                self._engine.inbox.put(Abort(entry.request_id, cause))
                if orphan is not None and cause == messages.MIGRATED:
                    # It may come back under the same id: its old state must not be adopted.
                    self._orphaned_requests.discard(orphan)
        if late:
            self._send(engine_pb2.ConnectResponse(already_finished=engine_pb2.AlreadyFinished(handles=late)))

    def _check_handle(self, handle: int) -> None:
        if handle in self._handles:
            raise AlreadyExists(f"handle {handle} is in use", reason="HANDLE_IN_USE")
        if len(self._handles) >= MAX_INFLIGHT_ADDS:
            raise ResourceExhausted(
                f"session has {len(self._handles)} requests in flight, the limit is {MAX_INFLIGHT_ADDS}",
                retry_after_ms=_RETRY_AFTER_MS,
            )

    def _check_entry(self, entry: add_pb2.AddEntry) -> None:
        """Check what depends on the session's other requests and on the rank of the engine."""
        if self._handles.has_unaborted((entry.request_id, entry.attempt)):
            raise AlreadyExists(
                f"request_id {entry.request_id[:_MAX_LOGGED_CHARACTERS]} is in use",
                reason="REQUEST_ID_IN_USE",
            )
        rank = self._engine.identity.dp_rank
        if entry.HasField("data_parallel_rank"):
            requested = entry.data_parallel_rank
            check(requested == rank, "data_parallel_rank", requested, f"{rank}, which is this engine's")

    def _admitting_core(self) -> LoadedCore:
        state, core = self._engine.lifecycle.state, self._engine.core
        if state is EngineState.READY and core is not None:
            return core
        raise Unavailable(
            f"engine is {state.value}", reason=f"ENGINE_{state.name}", retry_after_ms=_RETRY_AFTER_MS
        )

    def _reject(self, handle: int, entry_id: tuple[str, int], error: ServiceError) -> None:
        if handle not in self._handles:
            self._handles.settle(handle, entry_id)
        rejected = engine_pb2.AddRejected(
            handle=handle,
            attempt=entry_id[1],
            status=messages.to_error_status(error),
            retry_after_ms=error.retry_after_ms or 0,
        )
        self._send(engine_pb2.ConnectResponse(add_rejected=rejected))


@dataclass(slots=True)
class InFlight:
    """One request whose final output is not written yet. `entry_id` is (request id, attempt) of its ADD."""

    request_id: str
    entry_id: tuple[str, int]
    stop_token_ids: frozenset[int]
    orphan: OrphanedRequest | None = None  # if other sessions may adopt it
    is_aborted: bool = False
    opened: messages.OpenRequest | None = None  # of a resumable request
    takes_input: bool = False  # further segments
    segment: int = 0  # of its present turn
    is_idle: bool = False  # it waits for input
    is_noted: bool = False  # the note that follows the end was passed on

    @property
    def attempt(self) -> int:
        return self.entry_id[1]


class Handles:
    """Requests in flight by handle, and a bounded record of the handles that were settled last."""

    def __init__(self) -> None:
        self._in_flight: dict[int, InFlight] = {}
        self._by_entry_id: dict[tuple[str, int], InFlight] = {}  # those in flight; of equal ids the newest
        self._settled: dict[int, tuple[str, int]] = {}  # oldest first
        self._ended: dict[int, str] = {}  # ids of settled requests that have run and were not noted yet

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[int]:
        return iter(self._in_flight)

    def __contains__(self, handle: int) -> bool:
        return handle in self._in_flight

    def __getitem__(self, handle: int) -> InFlight:
        return self._in_flight[handle]

    def get(self, handle: int) -> InFlight | None:
        return self._in_flight.get(handle)

    def begin(self, handle: int, request: InFlight) -> None:
        self._in_flight[handle] = request
        self._by_entry_id[request.entry_id] = request

    def end(self, handles: Iterable[int]) -> None:
        for handle in handles:
            request = self._in_flight.pop(handle)
            if self._by_entry_id.get(request.entry_id) is request:
                del self._by_entry_id[request.entry_id]
            self.settle(handle, request.entry_id)
            if not request.is_noted:
                self._ended[handle] = request.request_id

    def has_unaborted(self, entry_id: tuple[str, int]) -> bool:
        """Whether such a request is in flight, not counting one that will end by an abort."""
        request = self._by_entry_id.get(entry_id)
        return request is not None and not request.is_aborted

    def settle(self, handle: int, entry_id: tuple[str, int]) -> None:
        """Remember that this ADD was rejected or has finished."""
        # Keeps the newest last, also where a handle is reused.
        self._settled.pop(handle, None)
        self._ended.pop(handle, None)
        self._settled[handle] = entry_id
        if len(self._settled) > _MAX_SETTLED:
            oldest = next(iter(self._settled))
            del self._settled[oldest]
            self._ended.pop(oldest, None)

    def take_ended(self, handle: int) -> str:
        """The id of a request that has ended or was aborted, at the first call; "" else."""
        running = self._in_flight.get(handle)
        if running is None:
            return self._ended.pop(handle, "")
        if not running.is_aborted or running.is_noted:
            return ""
        running.is_noted = True
        return running.request_id

    def is_settled(self, handle: int) -> bool:
        """Whether an ADD of `handle` was settled; False once it has been forgotten."""
        return handle in self._settled

    def has_seen(self, handle: int, entry_id: tuple[str, int]) -> bool:
        """Whether exactly this ADD was received before."""
        running = self._in_flight.get(handle)
        return entry_id == (self._settled.get(handle) if running is None else running.entry_id)

    def has_seen_request(self, handle: int, wire_id: str) -> bool:
        """Whether `handle` was used for this request id before, with any attempt."""
        running = self._in_flight.get(handle)
        seen = self._settled.get(handle) if running is None else running.entry_id
        return seen is not None and seen[0] == wire_id

    def clear(self) -> list[InFlight]:
        """Remove and return what is in flight."""
        requests = list(self._in_flight.values())
        self._in_flight.clear()
        self._by_entry_id.clear()
        return requests
