"""The road of one request through the frontend: admitted, tokenized, sent, streamed back, cleaned up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from frontend_svc.admission import Admission, Ticket
from frontend_svc.drain import Drain
from frontend_svc.engines.client import EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.loss import ENGINE_LOST
from frontend_svc.open_requests import OpenRequests, RequestPhase
from frontend_svc.output.collector import Collector, EndReason, Output, OutputKind, ReaderLimit
from frontend_svc.output.group import make_states
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import ServedModel
from frontend_svc.text.preprocess import AnyRequest, Prepared, check_request, prepare
from frontend_svc.text.prompt import Prompt
from frontend_svc.text.sampling import stream_interval
from frontend_svc.tracing import RequestTrace
from service_kit.errors import DeadlineExceeded, ServiceError, Unavailable
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

    def remaining_ms(self) -> int | None:
        """What an engine is told of the deadline, None of none. Raises DeadlineExceeded behind it."""
        remaining_s = self.remaining_s()
        if remaining_s is None or remaining_s >= _MAX_REMAINING_S:
            return None
        if remaining_s <= 0:
            raise too_late()
        return math.ceil(remaining_s * 1000)

    def abort_reason(self) -> engine_pb2.AbortReason:
        """Why what still runs for the caller is ended."""
        return engine_pb2.ABORT_REASON_DEADLINE if self.is_late() else engine_pb2.ABORT_REASON_CLIENT


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request as it was sent to one engine: a handle and a state for each of its outputs."""

    client: EngineClient
    handles: list[int]
    states: list[RequestState]

    @property
    def collector(self) -> Collector:
        """Where its outputs come together."""
        return self.states[0].collector

    def end(self) -> None:
        """Abort what has not ended, and tell the reader that it was."""
        self.client.end(self.handles)

    def abort(self, reason: engine_pb2.AbortReason) -> None:
        """End in the engine what has not ended, and forget it here."""
        self.client.abort(self.handles, reason)
        self.collector.close()


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
        self.finish_reason = "abort"
        self.num_attempts = 1
        self._num_output_tokens: dict[int, int] = {}
        self.attempt = send(None)
        self._resend: Callable[[EngineClient], Attempt] | None = send
        self._leave_queue = leave_queue

    async def next(self) -> Output:
        """What came since the last call, waiting for it; after the last nothing comes."""
        try:
            output = await self.attempt.collector.get()
        except Unavailable as error:
            if not self._is_sent_on(error):
                raise
            output = await self.attempt.collector.get()
        self._leave_queue()
        for piece in output.pieces:
            self._num_output_tokens[piece.index] = piece.num_output_tokens
            if piece.ending is not None:
                self.finish_reason = piece.ending.reason.name.lower()
                if piece.ending.reason is EndReason.ABORT and self._caller.is_late():
                    raise too_late()
        return output

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs that were read so far."""
        return sum(self._num_output_tokens.values())

    @property
    def phase(self) -> RequestPhase:
        """How far it is."""
        if self.attempt.collector.has_ended:
            return RequestPhase.FINISHED
        return RequestPhase.RUNNING if self.num_sampled_tokens else RequestPhase.QUEUED

    @property
    def num_prompt_tokens(self) -> int:
        """The length of its prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """How many of them came from the prefix cache."""
        return self.attempt.collector.num_cached_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all outputs, read or not."""
        return sum(state.num_output_tokens for state in self.attempt.states)

    @property
    def engine_id(self) -> str:
        """Where it runs."""
        return self.attempt.client.engine_id

    def end(self) -> None:
        """End its outputs as aborted, for whoever reads them."""
        self.attempt.end()

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
        self.num_attempts += 1
        return True


class Generation:
    """Runs requests on whatever engines there are.

    A request is either open, i.e. inside of `open`, or nowhere: leaving the block for whatever reason aborts
    it in the engine and frees its place, its id and its state.
    """

    def __init__(
        self,
        directory: Directory,
        admission: Admission,
        limits: RequestLimits,
        reader_limit: ReaderLimit,
        requests: OpenRequests,
        drain: Drain,
    ) -> None:
        self._directory = directory
        self._admission = admission
        self._requests = requests
        self._limits = limits
        self._reader_limit = reader_limit
        self._drain = drain

    def model(self, name: str) -> ServedModel:
        """The model served as `name`; see `Directory.model`."""
        return self._directory.model(name)

    @contextlib.asynccontextmanager
    async def open(
        self, request: AnyRequest, prompt: Prompt, caller: Caller, kind: OutputKind, trace: RequestTrace
    ) -> AsyncGenerator[OpenRequest, None]:
        """Check `request`, send it, and keep it alive inside of the block."""
        with (
            self._drain.counted(),
            trace,
            self._admission.claim(request.request_id),
            self._requests.track(request.request_id, caller.request_id) as tracked,
            self._admission.queue() as ticket,
        ):
            model = self._directory.model(request.model)
            prepared = await self._prepare(request, prompt, model, ticket, trace)
            opened = OpenRequest(
                caller,
                request.request_id or caller.request_id,
                model.name,
                prepared.prompt_token_ids,
                lambda avoided: self._send(request, prompt, prepared, model, caller, kind, trace, avoided),
                lambda: self._admission.leave_queue(ticket),
            )
            try:
                tracked.follow(opened)
                yield opened
            finally:
                reason = caller.abort_reason()
                if reason == engine_pb2.ABORT_REASON_DEADLINE:
                    trace.abort_cause = "deadline"
                opened.attempt.abort(reason)
                trace.note_output(opened.attempt.states, opened.num_output_tokens, opened.finish_reason)

    async def _prepare(
        self, request: AnyRequest, prompt: Prompt, model: ServedModel, ticket: Ticket, trace: RequestTrace
    ) -> Prepared:
        check_request(request, prompt, model, self._limits)
        with trace.tokenizing():
            prepared = await prepare(request, prompt, model, self._limits)
        self._admission.add_prompt(ticket, len(prepared.prompt_token_ids))
        trace.note_request(model.name, len(prepared.prompt_token_ids), prepared.entries[0].sampling)
        return prepared

    def _send(
        self,
        request: AnyRequest,
        prompt: Prompt,
        prepared: Prepared,
        model: ServedModel,
        caller: Caller,
        kind: OutputKind,
        trace: RequestTrace,
        avoided: EngineClient | None,
    ) -> Attempt:
        remaining_ms = caller.remaining_ms()
        rank = request.data_parallel_rank if request.HasField("data_parallel_rank") else None
        client = self._directory.pick(model, rank, avoided=avoided, num_requests=len(prepared.entries))
        handles: list[int] = []
        sampling = request.sampling
        collector = Collector(
            kind,
            len(prepared.entries),
            stream_interval=stream_interval(sampling, self._limits),
            limit=self._reader_limit,
            on_slow=lambda: client.abort(handles, engine_pb2.ABORT_REASON_SLOW_CONSUMER),
            awaits_prompt=sampling.HasField("prompt_logprobs"),
        )
        states = make_states(
            sampling,
            prepared.prompt_token_ids,
            model,
            collector,
            len(prepared.entries),
            markers=prompt.markers,
        )
        trace_context = add_pb2.TraceContext(traceparent=trace.traceparent, tracestate=caller.tracestate)
        for entry in prepared.entries:
            entry.attempt = 0 if avoided is None else 1
            entry.trace_context.CopyFrom(trace_context)
            if remaining_ms is not None:
                entry.remaining_ms = remaining_ms
        handles += client.add(prepared.entries, states)
        return Attempt(client, handles, states)


def too_late() -> DeadlineExceeded:
    """The error of a caller whose deadline has passed."""
    return DeadlineExceeded("the deadline of the call has passed")
