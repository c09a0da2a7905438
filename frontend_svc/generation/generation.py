"""Runs generation requests: admits and tokenizes them, sends them to engines, streams outputs, cleans up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator

from google.protobuf.message import Message

from frontend_svc.engines.adoption.takeover import AdoptedRequest, make_resumable
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.affinity import prefix_hash
from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.admission import Admission
from frontend_svc.generation.caller import Caller, too_late
from frontend_svc.generation.drain import Drain
from frontend_svc.generation.failover import EngineRequirements, Failover, Migration
from frontend_svc.generation.group import SamplingGroup, make_states
from frontend_svc.generation.kept_request import KeptRequest
from frontend_svc.generation.metrics import OutputMeter, RequestMetrics
from frontend_svc.generation.open_requests import OpenRequests, RequestPhase, TrackedRequest
from frontend_svc.generation.preprocess import Prepared, check_request, needs_of, prepare
from frontend_svc.generation.tenants import Tenants
from frontend_svc.generation.tracing import RequestTrace, RequestTraces
from frontend_svc.options.option import AnyRequest
from frontend_svc.output.collector import Ending, EndReason, Output, OutputKind, ReaderLimit
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import ServedModel
from frontend_svc.text.prompt import Prompt, RequestPrompt
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.engine.v1 import engine_pb2
from triptych_kit.errors import InvalidArgument, with_fields
from triptych_kit.telemetry import conventions as names

# Finish reasons that do not refill the retry budget.
_NOT_WELL = ("abort", "error")


class OpenRequest:
    """A request that is in an engine or waits for one, and its outputs."""

    def __init__(
        self,
        request_id: str,
        group: SamplingGroup,
        prepared: Prepared,
        caller: Caller,
        failover: Failover,
        routing: RoutingRequest,
    ) -> None:
        model = prepared.prompt.model
        self.request_id = request_id
        self.model = model.name
        self.served_as = prepared.prompt.served_as or model.name  # in answers
        self._served = model
        self.prompt_token_ids = prepared.prompt.token_ids
        self.max_tokens = prepared.entries[0].sampling.max_tokens
        self.finish_reason = "abort"
        self.on_read: Callable[[], None] = lambda: None  # called for each output that is read
        self.meter: OutputMeter | None = None
        self.states = group.states
        self._finish_reasons: dict[int, str] = {}
        self._num_output_tokens: dict[int, int] = {}
        self._caller = caller
        self._client_fields = prepared.prompt.client_fields
        self._group = group
        self._collector = group.states[0].collector
        self._migration = Migration(failover, EngineRequirements(model, routing), group)
        for state in group.states:
            state.on_lost = self._migration.lose

    def start(self) -> None:
        self._migration.start()

    def take_over(self, adopted: AdoptedRequest) -> None:
        """Continue a request that runs in an engine already. An output missing in `adopted` has ended."""
        self._migration.take_over(adopted.client, adopted.num_attempts)
        self._group.take_over(adopted, self._migration.end_probation)

    async def next(self) -> Output:
        """Wait for output and return all since the last call. Must not be called after the last output."""
        try:
            output = await self._collector.get()
        except InvalidArgument as error:
            raise with_fields(error, lambda field: self._client_fields.get(field, field)) from error
        self.on_read()
        for piece in output.pieces:
            self._num_output_tokens[piece.index] = piece.num_output_tokens
            if piece.ending is not None:
                self.finish_reason = piece.ending.reason.name.lower()
                self._finish_reasons[piece.index] = self.finish_reason
                if self.meter is not None:
                    self.meter.reasons[piece.index] = self.finish_reason
                if piece.ending.reason is EndReason.ABORT and self._caller.is_late():
                    raise too_late()
        return output

    def error_fields(self, ending: Ending) -> list[str]:
        """The client's fields that leave an output no token, if that has ended it."""
        return [self._client_fields.get(field, field) for field in ending.error_fields]

    def fill(self, message: Message, index: int = 0) -> None:
        """Add to a message of the answer what the request's options have read of output `index`."""
        self.states[index].fill(message)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons in the order in which the reader got the ends of outputs; abort if it got none."""
        return list(self._finish_reasons.values()) or [self.finish_reason]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs that were read."""
        return sum(self._num_output_tokens.values())

    @property
    def phase(self) -> RequestPhase:
        if self._collector.has_ended:
            return RequestPhase.FINISHED
        return RequestPhase.RUNNING if self.num_sampled_tokens else RequestPhase.QUEUED

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self._collector.num_cached_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all outputs, read or not."""
        return self._group.num_sampled_tokens

    @property
    def num_attempts(self) -> int:
        return self._migration.num_attempts

    @property
    def engine_id(self) -> str:
        """Empty while it waits for an engine."""
        client = self._migration.client
        return "" if client is None else client.engine_id

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its present engine, which may differ from that of the model at the start."""
        client = self._migration.client
        model = None if client is None else client.model
        return (model or self._served).fingerprint

    def end(self) -> None:
        """End its outputs as aborted; the reader gets that end."""
        client = self._migration.client
        if client is not None:
            client.requests.end(self._group.handles)
            return
        self._end_here()

    def end_turn(self) -> None:
        """End its output as aborted, with the next token where its engine keeps it for another turn."""
        if self._migration.client is None or not self._group.cancel_turn():
            self.end()
            return
        for state in self.states:
            state.on_lost = lambda kind, error: self._end_here()

    def abort(self, reason: engine_pb2.AbortReason) -> None:
        """Abort unfinished outputs in the engine and send it nowhere again. The reader gets no end."""
        client = self._migration.end(is_well=self.finish_reason not in _NOT_WELL)
        if client is not None:
            client.requests.abort(self._group.handles, reason)

    def leave(self) -> None:
        """Let its engine continue it for another frontend; no output arrives here any more."""
        client = self._migration.end(is_well=False)
        if client is not None:
            client.requests.adoptions.leave(self._group.handles)
        self._release()

    def close(self, reason: engine_pb2.AbortReason) -> None:
        """Abort unfinished outputs, and discard unread ones."""
        self.abort(reason)
        self._release()

    def _end_here(self) -> None:
        self._migration.end(is_well=False)
        for state in self.states:
            if not state.has_ended:
                state.advance([], Ending(EndReason.ABORT))

    def _release(self) -> None:
        # Break reference cycles: only a full garbage collection frees them, and if there are many, it stops
        # all streams for 30 to 100 ms.
        for state in self.states:
            state.on_lost = state.on_output = state.on_ended = None
        self._collector.close()


class Generation:
    """Runs requests on the engines of a directory.

    A request exists only inside of the `open` block: leaving the block for any reason aborts it in the engine
    and frees its queue slot, its id and its state.
    """

    def __init__(
        self,
        directory: Directory,
        failover: Failover,
        admission: Admission,
        limits: RequestLimits,
        reader_limit: ReaderLimit,
        requests: OpenRequests,
        drain: Drain,
        metrics: RequestMetrics,
        traces: RequestTraces,
        tenants: Tenants,
    ) -> None:
        self._tenants = tenants
        self._metrics = metrics
        self._traces = traces
        self._directory = directory
        self._failover = failover
        self._admission = admission
        self._requests = requests
        self._limits = limits
        self._reader_limit = reader_limit
        self._drain = drain

    def model(self, name: str) -> ServedModel:
        return self._directory.model(name)

    def counted(self) -> contextlib.AbstractContextManager[None]:
        """See `Drain.counted`."""
        return self._drain.counted()

    def awaited(self) -> contextlib.AbstractContextManager[None]:
        """See `Drain.awaited`."""
        return self._drain.awaited()

    @contextlib.asynccontextmanager
    async def open(
        self,
        request: AnyRequest,
        prompt: Prompt,
        caller: Caller,
        kind: OutputKind,
        *,
        kept: KeptRequest | None = None,
    ) -> AsyncGenerator[OpenRequest, None]:
        """Check `request`, send it, and keep it open inside of the block.

        kept: of the session that it is a turn of.
        """
        with (
            self._drain.counted(),
            self._traced(request, caller) as trace,
            self._metrics.counted(caller, _operation(request)) as record,
            self._requests.track(
                request.request_id, caller.request_id, tenant=caller.identity.tenant
            ) as tracked,
            self._tenants.admitted(caller.identity) as reservation,
            self._admission.queue(caller.identity) as ticket,
        ):
            model = self._directory.model(request.model, needs_of(request))
            prepared = await self._prepare(request, prompt, model, caller, trace)
            num_prompt_tokens = len(prepared.prompt.token_ids)
            reservation.reserve(num_prompt_tokens + _max_output_tokens(request, model, num_prompt_tokens))
            self._admission.add_prompt(ticket, num_prompt_tokens)
            opened = self._opened(request, prompt, prepared, caller, kind, trace, tracked, kept=kept)
            opened.on_read = lambda: self._admission.leave_queue(ticket)
            age_s = self._failover.clock.now() - tracked.arrived_at
            timed = self._metrics.timed(opened, record, age_s=age_s, is_late=caller.is_late)
            with _kept_open(opened, caller, trace), timed:
                opened.start()
                tracked.follow(opened)
                try:
                    yield opened
                finally:
                    reservation.settle(num_prompt_tokens + opened.num_sampled_tokens)

    @contextlib.asynccontextmanager
    async def adopt(
        self, adopted: AdoptedRequest, caller: Caller, kind: OutputKind
    ) -> AsyncGenerator[OpenRequest, None]:
        """Keep a request of another frontend open inside of the block, with its output from the start.

        Must be used inside of a `counted` block.
        """
        request = adopted.request
        with (
            self._traced(request, caller) as trace,
            self._requests.track(
                request.request_id, caller.request_id, tenant=caller.identity.tenant
            ) as tracked,
        ):
            prompt, model = RequestPrompt(request), adopted.client.model
            assert model is not None, "an engine that is ready has a model"
            prepared = await self._prepare(request, prompt, model, caller, trace)
            # The output up to here is delivered at once, so it does not count towards the reader's limit.
            limit = dataclasses.replace(
                self._reader_limit,
                max_tokens=self._reader_limit.max_tokens + adopted.num_tokens,
                max_bytes=self._reader_limit.max_bytes + adopted.size_bytes,
            )
            opened = self._opened(request, prompt, prepared, caller, kind, trace, tracked, limit=limit)
            self._metrics.counts.adopted.add()
            with _kept_open(opened, caller, trace):
                opened.take_over(adopted)
                tracked.follow(opened)
                yield opened

    def _traced(self, request: AnyRequest, caller: Caller) -> RequestTrace:
        return self._traces.begin(_operation(request), request.request_id or caller.request_id, caller)

    def _opened(
        self,
        request: AnyRequest,
        prompt: Prompt,
        prepared: Prepared,
        caller: Caller,
        kind: OutputKind,
        trace: RequestTrace,
        tracked: TrackedRequest,
        *,
        limit: ReaderLimit | None = None,
        kept: KeptRequest | None = None,
    ) -> OpenRequest:
        for entry in prepared.entries:
            entry.trace_context.tracestate = caller.tracestate
        seed = request.sampling.seed if request.sampling.HasField("seed") else None
        is_stream = kind is not OutputKind.FINAL_ONLY
        trace.note_sampling(prepared.entries[0].sampling, len(prepared.entries), seed, is_stream=is_stream)
        states = make_states(
            request,
            prompt,
            prepared,
            kind,
            stream_interval=max(self._limits.stream_interval, request.sampling.stream_interval),
            limit=limit or self._reader_limit,
            on_slow=lambda: opened.abort(engine_pb2.ABORT_REASON_SLOW_CONSUMER),
        )
        group = SamplingGroup(
            prepared, states, caller, trace, self._failover.clock, arrived_at=tracked.arrived_at, kept=kept
        )
        request_id = request.request_id or caller.request_id
        routing = _routing(request, prepared)
        opened = OpenRequest(request_id, group, prepared, caller, self._failover, routing)
        return opened

    async def _prepare(
        self, request: AnyRequest, prompt: Prompt, model: ServedModel, caller: Caller, trace: RequestTrace
    ) -> Prepared:
        await check_request(request, prompt, model, self._limits)
        with trace.tokenizing(), self._metrics.tokenizing():
            prepared = await prepare(request, prompt, model, caller)
        if caller.resume_token and isinstance(request, generate_pb2.GenerateRequest):
            request_id = request.request_id or caller.request_id
            make_resumable(
                prepared.entries,
                request,
                request_id,
                caller.scoped(caller.resume_token),
                has_tensors=bool(prepared.prompt.tensors),
            )
        trace.note_model(model.name, len(prepared.prompt.token_ids))
        return prepared


def _operation(request: AnyRequest) -> str:
    """By the GenAI conventions."""
    return names.CHAT if isinstance(request, chat_message_pb2.ChatRequest) else names.TEXT_COMPLETION


def _max_output_tokens(request: AnyRequest, model: ServedModel, num_prompt_tokens: int) -> int:
    """How many tokens all outputs may have together."""
    room = max(0, model.max_model_len - num_prompt_tokens)
    max_tokens = request.sampling.max_tokens
    return max(1, request.sampling.n) * (min(max_tokens, room) if max_tokens else room)


def _routing(request: AnyRequest, prepared: Prepared) -> RoutingRequest:
    return RoutingRequest(
        num_prompt_tokens=len(prepared.prompt.token_ids),
        num_requests=len(prepared.entries),
        session_id=request.session_id or prepared.prompt.session_id,
        # Token ids at positions of tensors do not show whether two prompts have a common prefix.
        prefix_hash=b"" if prepared.prompt.tensors else prefix_hash(prepared.prompt.token_ids),
        slot=prepared.prompt.slot,
        data_parallel_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
        needs=(*needs_of(request), *prepared.prompt.needs),
    )


@contextlib.contextmanager
def _kept_open(opened: OpenRequest, caller: Caller, trace: RequestTrace) -> Iterator[None]:
    """At the end of the block, abort the request unless it has ended or is left to other frontends."""
    try:
        yield
    finally:
        reason = caller.abort_reason()
        if reason == engine_pb2.ABORT_REASON_DEADLINE:
            trace.abort_cause = "deadline"
        engine_id = opened.engine_id
        if caller.is_left():
            trace.abort_cause = "left"
            opened.leave()
        else:
            opened.close(reason)
        trace.note_output(opened.states, opened.num_output_tokens, opened.finish_reasons, engine_id)
