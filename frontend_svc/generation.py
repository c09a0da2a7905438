"""The road of one request through the frontend: admitted, tokenized, sent, streamed back, cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from frontend_svc.admission import Admission, Ticket
from frontend_svc.engines.client import ENGINE_LOST, RETRY_AFTER_MS, EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.output.collector import Collector, EndReason, Output, OutputKind, ReaderLimit
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import ServedModel
from frontend_svc.text.preprocess import Prepared, build_entry, check_request, tokenize_prompt
from frontend_svc.text.stop_strings import StopBuffer
from frontend_svc.tracing import RequestTrace
from service_kit.errors import DeadlineExceeded, ServiceError, Unavailable
from triptych.api.v1 import generate_pb2
from triptych.engine.v1 import add_pb2, engine_pb2

_MAX_REMAINING_S = 10 * 365 * 86400.0
# What the engine's clock and ours may differ by about one deadline, and how much gRPC rounds one by.
_LATE_S = 0.002
_ROUNDED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Caller:
    """What a call brings besides its request. `remaining_s` is None where there is no deadline."""

    request_id: str
    traceparent: str
    tracestate: str
    remaining_s: Callable[[], float | None]
    patience_s: float | None = None  # what remained when the call arrived

    def is_late(self) -> bool:
        """True when the caller's deadline has passed, or passes before an answer could be with it."""
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s < _LATE_S + _ROUNDED_SHARE * (self.patience_s or 0.0)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request as it was sent to one engine."""

    client: EngineClient
    handle: int
    state: RequestState

    def abort(self, reason: engine_pb2.AbortReason) -> None:
        """End it in the engine, where it has not ended, and forget it here."""
        self.client.abort(self.handle, reason)
        self.state.collector.close()


class OpenRequest:
    """A request that is in an engine: who it is, and its outputs.

    `send` sends it to an engine other than the given one, if that is not None. It is sent a second time when
    the first engine refuses it for now, as one does that has just begun to drain.
    """

    def __init__(
        self,
        caller: Caller,
        request_id: str,
        model: str,
        prompt_token_ids: list[int],
        send: Callable[[EngineClient | None], Attempt],
        leave_queue: Callable[[], None],
    ) -> None:
        self._caller = caller
        self.request_id = request_id
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        self.num_output_tokens = 0
        self.finish_reason = "abort"
        self.attempt = send(None)
        self._resend: Callable[[EngineClient], Attempt] | None = send
        self._leave_queue = leave_queue

    async def next(self) -> Output:
        """What came since the last call, waiting for it; the last has an ending."""
        try:
            output = await self.attempt.state.collector.get()
        except Unavailable as error:
            if not self._is_sent_on(error):
                raise
            output = await self.attempt.state.collector.get()
        self._leave_queue()
        self.num_output_tokens = output.num_output_tokens
        if output.ending is not None:
            self.finish_reason = output.ending.reason.name.lower()
            if output.ending.reason is EndReason.ABORT and self._caller.is_late():
                raise _too_late()
        return output

    def _is_sent_on(self, error: Unavailable) -> bool:
        # An engine that was lost may have been brought down by this very request.
        resend, self._resend = self._resend, None
        if resend is None or self.num_output_tokens or error.reason == ENGINE_LOST:
            return False
        try:
            self.attempt = resend(self.attempt.client)
        except ServiceError:
            # That no other engine can take it says less than why the first one did not.
            return False
        return True


class Generation:
    """Runs requests on whatever engines there are.

    A request is either open, i.e. inside of `open`, or nowhere: leaving the block for whatever reason aborts
    it in the engine and frees its place, its id and its state.
    """

    def __init__(
        self, directory: Directory, admission: Admission, limits: RequestLimits, reader_limit: ReaderLimit
    ) -> None:
        self._directory = directory
        self._admission = admission
        self._limits = limits
        self._reader_limit = reader_limit
        self._num_open = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        """Requests that have arrived and not ended."""
        return self._num_open

    @property
    def is_draining(self) -> bool:
        """True once new requests are refused."""
        return self._is_draining

    async def drain(self) -> None:
        """Refuse new requests from here on; returns when the open ones have ended."""
        self._is_draining = True
        await self._idle.wait()

    @contextlib.asynccontextmanager
    async def open(
        self, request: generate_pb2.GenerateRequest, caller: Caller, kind: OutputKind, trace: RequestTrace
    ) -> AsyncGenerator[OpenRequest, None]:
        """Check `request`, send it, and keep it alive inside of the block."""
        with (
            self._counted(),
            trace,
            self._admission.claim(request.request_id),
            self._admission.queue() as ticket,
        ):
            model = self._directory.model(request.model)
            prepared = await self._prepare(request, model, ticket, trace)
            opened = OpenRequest(
                caller,
                request.request_id or caller.request_id,
                model.name,
                prepared.prompt_token_ids,
                lambda avoided: self._send(request, prepared, model, caller, kind, trace, avoided),
                lambda: self._admission.leave_queue(ticket),
            )
            try:
                yield opened
            finally:
                reason = _abort_reason(caller)
                if reason == engine_pb2.ABORT_REASON_DEADLINE:
                    trace.abort_cause = "deadline"
                opened.attempt.abort(reason)
                trace.note_output(opened.attempt.state, opened.num_output_tokens, opened.finish_reason)

    async def _prepare(
        self, request: generate_pb2.GenerateRequest, model: ServedModel, ticket: Ticket, trace: RequestTrace
    ) -> Prepared:
        check_request(request, model, self._limits)
        with trace.tokenizing():
            prompt_token_ids = await tokenize_prompt(request, model)
        prepared = build_entry(request, prompt_token_ids, model)
        self._admission.add_prompt(ticket, len(prompt_token_ids))
        trace.note_request(model.name, len(prompt_token_ids), prepared.entry.sampling)
        return prepared

    def _send(
        self,
        request: generate_pb2.GenerateRequest,
        prepared: Prepared,
        model: ServedModel,
        caller: Caller,
        kind: OutputKind,
        trace: RequestTrace,
        avoided: EngineClient | None,
    ) -> Attempt:
        remaining_s = caller.remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            raise _too_late()
        rank = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        client = self._directory.pick(model, rank, avoided=avoided)
        sent: list[int] = []
        collector = Collector(
            kind,
            stream_interval=max(1, request.sampling.stream_interval),
            limit=self._reader_limit,
            on_slow=lambda: client.abort(sent[0], engine_pb2.ABORT_REASON_SLOW_CONSUMER),
        )
        state = _request_state(request, prepared.prompt_token_ids, model, collector)
        entry = prepared.entry
        entry.attempt = 0 if avoided is None else 1
        entry.trace_context.CopyFrom(
            add_pb2.TraceContext(traceparent=trace.traceparent, tracestate=caller.tracestate)
        )
        if remaining_s is not None and remaining_s < _MAX_REMAINING_S:
            entry.remaining_ms = math.ceil(remaining_s * 1000)
        sent.append(client.add(entry, state))
        return Attempt(client, sent[0], state)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._is_draining:
            raise Unavailable(
                "this frontend is shutting down", reason="DRAINING", retry_after_ms=RETRY_AFTER_MS
            )
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._idle.set()


def _request_state(
    request: generate_pb2.GenerateRequest,
    prompt_token_ids: list[int],
    model: ServedModel,
    collector: Collector,
) -> RequestState:
    sampling = request.sampling
    skips_special = sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
    detokenizer = None
    if not sampling.HasField("detokenize") or sampling.detokenize:
        detokenizer = model.tokenizer.detokenizer(prompt_token_ids, skip_special_tokens=skips_special)
    include = sampling.include_stop_in_output
    return RequestState(
        collector,
        detokenizer,
        StopBuffer(sampling.stop, include=include) if sampling.stop else None,
        include_stop=include,
        min_tokens=sampling.min_tokens,
    )


def _abort_reason(caller: Caller) -> engine_pb2.AbortReason:
    return engine_pb2.ABORT_REASON_DEADLINE if caller.is_late() else engine_pb2.ABORT_REASON_CLIENT


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline of the call has passed")
