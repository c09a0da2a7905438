"""Runs pooling requests: admits and tokenizes them, sends the prompts to engines, gathers the results."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from frontend_svc.engines.connection.client import EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.routing.affinity import prefix_hash
from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.admission import Admission, Ticket
from frontend_svc.generation.caller import Caller, too_late
from frontend_svc.generation.drain import Drain
from frontend_svc.generation.failover import EngineRequirements, Failover, Migration, Move
from frontend_svc.generation.open_requests import OpenRequests, RequestPhase
from frontend_svc.generation.poison import Content, content_of
from frontend_svc.generation.tenants import Tenants
from frontend_svc.generation.tracing import RequestTrace, RequestTraces
from frontend_svc.options import OPTIONS
from frontend_svc.options.option import PreparedPrompt
from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.pooling_state import Pooled, PoolingState
from frontend_svc.text.model import ServedModel
from frontend_svc.text.pooling import is_per_token
from frontend_svc.text.tokenize.id_column import id_column
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.clock import Clock
from triptych_kit.errors import Aborted, ServiceError
from triptych_kit.telemetry import conventions as names

# Prompts of one request that are in engines at once: enough to fill the next batch while one is computed,
# and room for other requests. As many as the first may be long; short ones are limited by their tokens.
_MIN_SENT, _MAX_SENT, _MAX_SENT_TOKENS = 32, 512, 4096


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """One prompt. Prompts with the same `affinity_key` go to one engine; empty: to any.

    second_text_start: index of the first token of a second text; None: there is none, or it does not matter.
    """

    token_ids: list[int]
    affinity_key: str = ""
    second_text_start: int | None = None


@dataclass(frozen=True, slots=True)
class PoolingWork:
    """A pooling request; `tokenize` returns the prompts, each of which becomes one result.

    model_name: its field `model`, which may name other weights of the model.
    """

    request_id: str
    model_name: str
    model: ServedModel
    params: sampling_pb2.PoolingParams
    tokenize: Callable[[], Awaitable[list[PoolingPrompt]]]


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """The results in the order of the prompts, and the prompts' total number of tokens."""

    request_id: str
    results: list[Pooled]
    num_prompt_tokens: int


class SentPrompt:
    """One prompt as it is sent to engines, and the state that gets its result. A `MovableRequest`."""

    has_begun = False
    kept_by: EngineClient | None = None

    def __init__(
        self,
        model: ServedModel,
        entry: add_pb2.AddEntry,
        caller: Caller,
        trace: RequestTrace,
        clock: Clock,
        arrived_at: float,
    ) -> None:
        self.state = PoolingState()
        self.handles: list[int] = []  # in the engine it was sent to last
        self.engine_id = ""
        self._model = model
        self._entry = entry
        self._caller = caller
        self._trace = trace
        self._clock = clock
        self._arrived_at = arrived_at

    def send(self, client: EngineClient, attempt: int, on_output: Callable[[], None] | None) -> None:
        remaining_ms = self._caller.remaining_ms()
        if attempt:
            # An entry that was sent must not change, because it may have to be resent to its engine.
            sent, self._entry = self._entry, add_pb2.AddEntry()
            self._entry.CopyFrom(sent)
        entry = self._entry
        if remaining_ms is not None:
            entry.remaining_ms = remaining_ms
        entry.attempt = attempt
        entry.age_ms = round((self._clock.now() - self._arrived_at) * 1000)
        self.engine_id = client.engine_id
        self.handles[:] = client.requests.add([entry], [self.state])

    def withdraw(self, client: EngineClient) -> None:
        """An engine that rejects it has nothing of it."""

    def on_move(self, move: Move) -> None:
        self._trace.note_migration(move, 0)

    def fail(self, error: ServiceError) -> None:
        self.state.end_with(too_late() if self._caller.is_late() else error)

    def content(self) -> Content:
        return content_of(self._caller.identity.account, self._model.name, [self._entry])

    def remaining_s(self) -> float | None:
        return self._caller.remaining_s()


class PooledPrompt:
    """One prompt that runs in an engine or waits for one."""

    def __init__(self, sent: SentPrompt, caller: Caller, migration: Migration, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._sent = sent
        self._caller = caller
        self._migration = migration
        sent.state.on_lost = migration.lose

    @property
    def num_attempts(self) -> int:
        return self._migration.num_attempts

    @property
    def engine_id(self) -> str:
        """The last engine it was sent to."""
        return self._sent.engine_id

    async def run(self) -> Pooled:
        """The result, or raises the error that ended the request. Nothing of it is left afterwards."""
        is_well = False
        try:
            self._migration.start()
            pooled = await self._sent.state.result()
            is_well = True
        except Aborted as error:
            if self._caller.is_late():
                raise too_late() from error
            raise
        finally:
            client = self._migration.end(is_well=is_well)
            if client is not None:
                client.requests.abort(self._sent.handles, self._caller.abort_reason())
            # Breaks a reference cycle.
            self._sent.state.on_lost = None
        return pooled

    def end(self) -> None:
        """End it as aborted."""
        client = self._migration.client
        if client is not None:
            client.requests.end(self._sent.handles)
        else:
            self._migration.end(is_well=False)
            self._sent.state.advance([], Ending(EndReason.ABORT))


class PoolingProgress:
    """Progress of a pooling request, for GetRequest and Abort: its prompts in engines and finished ones."""

    def __init__(self, num_prompt_tokens: int, num_prompts: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_sampled_tokens = 0
        self._num_left = num_prompts
        self._num_prompts = num_prompts
        self._max_attempts = 0
        self._engine_id = ""
        self._sent: dict[PooledPrompt, None] = {}  # in the order in which they were started
        self._is_ended = False

    @property
    def phase(self) -> RequestPhase:
        """RUNNING from the first result on."""
        if not self._num_left:
            return RequestPhase.FINISHED
        return RequestPhase.RUNNING if self._num_left < self._num_prompts else RequestPhase.QUEUED

    @property
    def num_attempts(self) -> int:
        """The maximum over the prompts of how often one was sent to an engine."""
        return max((prompt.num_attempts for prompt in self._sent), default=self._max_attempts)

    @property
    def engine_id(self) -> str:
        """The engine of the prompt that was started last."""
        newest = next(reversed(self._sent), None)
        return self._engine_id if newest is None else newest.engine_id

    def end(self) -> None:
        """End the prompts in engines and send no more: the request ends as aborted."""
        self._is_ended = True
        for prompt in list(self._sent):
            prompt.end()

    @contextlib.contextmanager
    def sent(self, prompt: PooledPrompt) -> Iterator[None]:
        """Track a prompt inside of the block. Raises Aborted after `end`."""
        if self._is_ended:
            raise Aborted("the request was aborted before its result was computed")
        self._sent[prompt] = None
        try:
            yield
        finally:
            # The number of prompts is large: nothing here may look at all of them.
            self._engine_id = self.engine_id
            self._max_attempts = max(self._max_attempts, prompt.num_attempts)
            del self._sent[prompt]

    def note(self, pooled: Pooled) -> None:
        """Count a prompt that has its result."""
        self._num_left -= 1
        self.num_cached_tokens += pooled.num_cached_tokens


class Pooling:
    """Runs pooling requests. Nothing of a request is left in engines when `run` has ended."""

    def __init__(
        self,
        directory: Directory,
        failover: Failover,
        admission: Admission,
        requests: OpenRequests,
        drain: Drain,
        traces: RequestTraces,
        tenants: Tenants,
    ) -> None:
        self._tenants = tenants
        self._directory = directory
        self._failover = failover
        self._admission = admission
        self._requests = requests
        self._drain = drain
        self._traces = traces

    def model(self, name: str) -> ServedModel:
        return self._directory.model(name)

    async def run(self, work: PoolingWork, caller: Caller) -> PooledPrompts:
        """All results of `work`. Raises the first error of any prompt, after aborting the others."""
        request_id = work.request_id or caller.request_id
        with (
            self._drain.counted(),
            self._traces.begin(names.EMBEDDINGS, request_id, caller) as trace,
            self._requests.track(
                work.request_id, caller.request_id, tenant=caller.identity.tenant
            ) as tracked,
            self._tenants.admitted(caller.identity) as reservation,
            self._admission.queue(caller.identity) as ticket,
        ):
            with trace.tokenizing():
                prompts = await work.tokenize()
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            trace.note_model(work.model.name, num_tokens)
            reservation.reserve(num_tokens)
            self._admission.add_prompt(ticket, num_tokens)
            progress = PoolingProgress(num_tokens, len(prompts))
            tracked.follow(progress)
            shared = _shared_entry(work, trace, caller)
            prepared = PreparedPrompt("inputs", work.model, [], [], None)
            for option in OPTIONS:
                option.prepare_pooling(work.model_name, prepared, shared)
            reservation.settle(num_tokens)

            def pooled(prompt: PoolingPrompt) -> PooledPrompt:
                failover, entry = self._failover, _entry(shared, prompt)
                sent = SentPrompt(work.model, entry, caller, trace, failover.clock, tracked.arrived_at)
                requirements = EngineRequirements(work.model, _routing(work.params, prompt, prepared))
                migration = Migration(failover, requirements, sent)
                return PooledPrompt(sent, caller, migration, len(prompt.token_ids))

            # Each is made when it is sent: thousands of them would be memory and work of the collector.
            results = await self._run_all(map(pooled, prompts), ticket, progress)
            return PooledPrompts(request_id, results, num_tokens)

    async def _run_all(
        self, prompts: Iterator[PooledPrompt], ticket: Ticket, progress: PoolingProgress
    ) -> list[Pooled]:
        window = _Window()

        async def run(prompt: PooledPrompt) -> Pooled:
            with window.leaving(prompt.num_tokens), progress.sent(prompt):
                pooled = await prompt.run()
            progress.note(pooled)
            self._admission.leave_queue(ticket)
            return pooled

        tasks: list[asyncio.Future[Pooled]] = []
        try:
            while True:
                await window.room()
                if window.has_failed or (prompt := next(prompts, None)) is None:
                    break
                window.enter(prompt.num_tokens)
                tasks.append(asyncio.ensure_future(run(prompt)))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Window:
    """The prompts of a request that are in engines."""

    def __init__(self) -> None:
        self.has_failed = False
        self._num_prompts = self._num_tokens = 0
        self._left = asyncio.Event()

    async def room(self) -> None:
        """Wait until there is room for another, or one has failed."""
        while self._is_full and not self.has_failed:
            self._left.clear()
            await self._left.wait()

    def enter(self, num_tokens: int) -> None:
        self._num_prompts += 1
        self._num_tokens += num_tokens

    @contextlib.contextmanager
    def leaving(self, num_tokens: int) -> Iterator[None]:
        """A prompt that has entered leaves with the end of the block."""
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self._num_prompts -= 1
            self._num_tokens -= num_tokens
            self._left.set()

    @property
    def _is_full(self) -> bool:
        if self._num_prompts < _MIN_SENT:
            return False
        return self._num_prompts >= _MAX_SENT or self._num_tokens >= _MAX_SENT_TOKENS


def _routing(
    params: sampling_pb2.PoolingParams, prompt: PoolingPrompt, prepared: PreparedPrompt
) -> RoutingRequest:
    return RoutingRequest(
        num_prompt_tokens=len(prompt.token_ids),
        prefix_hash=b"" if is_per_token(params.task) else prefix_hash(prompt.token_ids),
        affinity_key=params.late_interaction_key or prompt.affinity_key,
        slot=prepared.slot,
        needs=tuple(prepared.needs),
    )


def _shared_entry(work: PoolingWork, trace: RequestTrace, caller: Caller) -> add_pb2.AddEntry:
    """What the ADDs of all prompts have in common."""
    entry = add_pb2.AddEntry(
        external_request_id=work.request_id,
        pooling=work.params,
        account=caller.identity.account,
        weight=caller.identity.limits.weight,
        trace_context=add_pb2.TraceContext(traceparent=trace.traceparent, tracestate=caller.tracestate),
    )
    entry.cache_salt = caller.scoped("")
    if work.params.late_interaction_key:
        entry.pooling.late_interaction_key = caller.scoped(work.params.late_interaction_key)
    if is_per_token(work.params.task):
        entry.skip_reading_prefix_cache = True
    return entry


def _entry(shared: add_pb2.AddEntry, prompt: PoolingPrompt) -> add_pb2.AddEntry:
    entry = add_pb2.AddEntry()
    entry.CopyFrom(shared)
    entry.request_id = secrets.token_hex(16)
    entry.prompt_token_ids = id_column(prompt.token_ids)
    if prompt.second_text_start is not None:
        entry.second_text_start = prompt.second_text_start
    return entry
