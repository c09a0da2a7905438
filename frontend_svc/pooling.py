"""The road of a pooling request: admitted, tokenized, its prompts sent to engines, its results gathered."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from frontend_svc.admission import Admission, Ticket
from frontend_svc.drain import Drain
from frontend_svc.engines.client import EngineClient
from frontend_svc.engines.directory import Directory
from frontend_svc.engines.loss import ENGINE_LOST
from frontend_svc.generation import Caller, too_late
from frontend_svc.open_requests import OpenRequests, RequestPhase
from frontend_svc.output.pooling_state import Pooled, PoolingState
from frontend_svc.text.id_column import id_column
from frontend_svc.text.model import ServedModel
from frontend_svc.text.pooling import is_per_token
from frontend_svc.tracing import RequestTrace
from service_kit.errors import Aborted, Unavailable
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2

# Prompts of one request that are in engines at once: enough to fill a batch, few enough to leave room.
_MAX_SENT = 32


@dataclass(frozen=True, slots=True)
class PoolingWork:
    """What is to be pooled: `tokenize` gives the prompts, each of which becomes one result."""

    request_id: str
    model: ServedModel
    params: sampling_pb2.PoolingParams
    tokenize: Callable[[], Awaitable[list[list[int]]]]


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """The results in order of the prompts, and how many tokens those had together."""

    request_id: str
    results: list[Pooled]
    num_prompt_tokens: int


class PoolingProgress:
    """How far a pooling request is, and its end from outside: its prompts in engines, and what is done."""

    def __init__(self, num_prompt_tokens: int, num_prompts: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_sampled_tokens = 0
        self.engine_id = ""
        self._engine_ids: set[str] = set()
        self._num_left = num_prompts
        self._num_prompts = num_prompts
        self._sent: list[tuple[EngineClient, list[int]]] = []
        self._is_ended = False

    @property
    def phase(self) -> RequestPhase:
        """How far it is: RUNNING from its first result on."""
        if not self._num_left:
            return RequestPhase.FINISHED
        return RequestPhase.RUNNING if self._num_left < self._num_prompts else RequestPhase.QUEUED

    @property
    def num_attempts(self) -> int:
        """How many engines it was sent to."""
        return len(self._engine_ids)

    def end(self) -> None:
        """End the prompts in engines, and send no more: the request ends as aborted."""
        self._is_ended = True
        for client, handles in list(self._sent):
            client.end(handles)

    @contextlib.contextmanager
    def sent(self, client: EngineClient, handles: list[int]) -> Iterator[None]:
        """Know a prompt that is in an engine, inside of the block."""
        self.engine_id = client.engine_id
        self._engine_ids.add(client.engine_id)
        place = (client, handles)
        self._sent.append(place)
        try:
            yield
        finally:
            self._sent.remove(place)

    def note(self, pooled: Pooled) -> None:
        """Count a prompt that has its result."""
        self._num_left -= 1
        self.num_cached_tokens += pooled.num_cached_tokens

    def check(self) -> None:
        """Raise Aborted once it was ended."""
        if self._is_ended:
            raise Aborted("the request was ended before its result was there")


class Pooling:
    """Runs pooling requests on whatever engines there are. Nothing of a request is left when it has ended."""

    def __init__(
        self, directory: Directory, admission: Admission, requests: OpenRequests, drain: Drain
    ) -> None:
        self._directory = directory
        self._admission = admission
        self._requests = requests
        self._drain = drain

    def model(self, name: str) -> ServedModel:
        """The model served as `name`; see `Directory.model`."""
        return self._directory.model(name)

    async def run(self, work: PoolingWork, caller: Caller) -> PooledPrompts:
        """All results of `work`. Raises the first error of any prompt; the others are aborted then."""
        request_id = work.request_id or caller.request_id
        trace = RequestTrace(request_id, caller.traceparent, caller.tracestate)
        with (
            self._drain.counted(),
            trace,
            self._admission.claim(work.request_id),
            self._requests.track(work.request_id, caller.request_id) as tracked,
            self._admission.queue() as ticket,
        ):
            with trace.tokenizing():
                prompts = await work.tokenize()
            num_tokens = sum(map(len, prompts))
            self._admission.add_prompt(ticket, num_tokens)
            entries = [_entry(work, token_ids, trace, caller) for token_ids in prompts]
            progress = PoolingProgress(num_tokens, len(prompts))
            tracked.follow(progress)
            results = await self._run_all(work.model, entries, caller, ticket, progress)
            return PooledPrompts(request_id, results, num_tokens)

    async def _run_all(
        self,
        model: ServedModel,
        entries: Sequence[add_pb2.AddEntry],
        caller: Caller,
        ticket: Ticket,
        progress: PoolingProgress,
    ) -> list[Pooled]:
        places = asyncio.Semaphore(_MAX_SENT)

        async def run_in_turn(entry: add_pb2.AddEntry) -> Pooled:
            async with places:
                pooled = await self._run_one(model, entry, caller, progress)
            progress.note(pooled)
            self._admission.leave_queue(ticket)
            return pooled

        tasks = [asyncio.ensure_future(run_in_turn(entry)) for entry in entries]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(
        self, model: ServedModel, entry: add_pb2.AddEntry, caller: Caller, progress: PoolingProgress
    ) -> Pooled:
        client = self._directory.pick(model, None)
        try:
            return await _send(client, entry, caller, progress)
        except Unavailable as error:
            # An engine that was lost may have been brought down by this very request.
            if error.reason == ENGINE_LOST:
                raise
            entry.attempt = 1
            other = self._directory.pick(model, None, avoided=client)
            return await _send(other, entry, caller, progress)


async def _send(
    client: EngineClient, entry: add_pb2.AddEntry, caller: Caller, progress: PoolingProgress
) -> Pooled:
    progress.check()
    remaining_ms = caller.remaining_ms()
    if remaining_ms is not None:
        entry.remaining_ms = remaining_ms
    state = PoolingState()
    handles = client.add([entry], [state])
    try:
        with progress.sent(client, handles):
            return await state.result()
    except Aborted as error:
        if caller.is_late():
            raise too_late() from error
        raise
    finally:
        client.abort(handles, caller.abort_reason())


def _entry(
    work: PoolingWork, token_ids: Sequence[int], trace: RequestTrace, caller: Caller
) -> add_pb2.AddEntry:
    entry = add_pb2.AddEntry(
        request_id=secrets.token_hex(16),
        external_request_id=work.request_id,
        prompt_token_ids=id_column(token_ids),
        pooling=work.params,
        trace_context=add_pb2.TraceContext(traceparent=trace.traceparent, tracestate=caller.tracestate),
    )
    if is_per_token(work.params.task):
        entry.skip_reading_prefix_cache = True
    return entry
