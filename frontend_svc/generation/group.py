"""Sampling groups: their request states, and how they are sent to engines. Knows nothing of failover."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from frontend_svc.engines.adoption.takeover import AdoptedRequest
from frontend_svc.engines.connection.client import EngineClient
from frontend_svc.generation.caller import Caller, too_late
from frontend_svc.generation.failover import Move
from frontend_svc.generation.kept_request import KeptRequest
from frontend_svc.generation.poison import Content, content_of
from frontend_svc.generation.preprocess import Prepared, has_text
from frontend_svc.generation.tracing import RequestTrace
from frontend_svc.options import OPTIONS
from frontend_svc.options.option import AnyRequest
from frontend_svc.output.collector import Collector, Ending, EndReason, OutputKind, ReaderLimit
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.prompt import Prompt
from frontend_svc.text.stop_strings import StopBuffer
from frontend_svc.text.tokenize.id_column import id_column
from triptych.api.v1 import chat_message_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2
from triptych_kit.clock import Clock
from triptych_kit.errors import ServiceError


class SamplingGroup:
    """The outputs of one request, which are in the same engine. Implements `MovableRequest`."""

    def __init__(
        self,
        prepared: Prepared,
        states: list[RequestState],
        caller: Caller,
        trace: RequestTrace,
        clock: Clock,
        *,
        arrived_at: float,
        kept: KeptRequest | None = None,
    ) -> None:
        """kept: of the session that this is a turn of."""
        self.states = states
        self.handles: list[int] = []  # in the engine it was sent to last
        self._client: EngineClient | None = None  # that engine
        self._handle_of: dict[RequestState, int] = {}
        self._prepared = prepared
        self._caller = caller
        self._trace = trace
        self._clock = clock
        self._arrived_at = arrived_at
        self._kept = kept
        if prepared.prompt.hint_of is not None:
            self._hint_ends(prepared.prompt.hint_of)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all outputs, read or not."""
        return sum(state.num_output_tokens for state in self.states)

    @property
    def has_begun(self) -> bool:
        return any(state.has_begun for state in self.states)

    @property
    def kept_by(self) -> EngineClient | None:
        return None if self._kept is None else self._kept.engine_for(self._prepared)

    def take_over(self, adopted: AdoptedRequest, on_output: Callable[[], None]) -> None:
        """Continue a request that runs in an engine already. An output missing in `adopted` has ended."""
        client, outputs = adopted.client, adopted.outputs
        self.handles[:] = [adoptee.handle for adoptee in outputs.values()]
        self._client = client
        self._handle_of = {self.states[index]: adoptee.handle for index, adoptee in outputs.items()}
        for index, state in enumerate(self.states):
            state.on_output = on_output
            state.times.begin(adopted.num_attempts - 1, client.engine_id)
            if index not in outputs:
                state.advance([], Ending(EndReason.STOP))
        client.requests.adoptions.hand_over(
            (adoptee, self.states[index]) for index, adoptee in outputs.items()
        )

    def send(self, client: EngineClient, attempt: int, on_output: Callable[[], None] | None) -> None:
        remaining_ms = self._caller.remaining_ms()
        age_ms = round((self._clock.now() - self._arrived_at) * 1000)
        has_begun = self.has_begun
        entries, states = [], []
        for index, (entry, state) in enumerate(zip(self._prepared.entries, self.states, strict=True)):
            state.is_continued = has_begun
            if state.has_ended:
                continue
            # A copy: an entry that was sent must not change, because it may have to be resent to its engine.
            sent = add_pb2.AddEntry()
            sent.CopyFrom(entry)
            sent.attempt = attempt
            sent.trace_context.traceparent = self._trace.begin_attempt(index, attempt)
            sent.output_token_ids = id_column(state.output_token_ids)
            sent.age_ms = age_ms
            sent.resumable = self._kept is not None
            if remaining_ms is not None:
                sent.remaining_ms = remaining_ms
            state.on_output = on_output
            state.times.begin(attempt, client.engine_id)
            entries.append(sent)
            states.append(state)
        if self._kept is None:
            self.handles[:] = client.requests.add(entries, states, self._prepared.prompt.tensors)
        else:
            self._send_turn(self._kept, client, entries[0])
        self._client, self._handle_of = client, dict(zip(states, self.handles, strict=True))

    def _send_turn(self, kept: KeptRequest, client: EngineClient, entry: add_pb2.AddEntry) -> None:
        (state,) = self.states
        if kept.engine_for(self._prepared) is not client:
            self._open_turn(kept, client, entry)
            return
        segment = kept.continue_with(entry, self._prepared)
        client.requests.extend(segment, state, lambda: self._open_turn(kept, client, entry))
        self.handles[:] = [segment.handle]
        kept.sent(client, segment)

    def _open_turn(self, kept: KeptRequest, client: EngineClient, entry: add_pb2.AddEntry) -> None:
        """Open a request, also where the engine has ended the one that it kept before it got this turn."""
        (state,) = self.states
        if kept.is_cancelled:
            state.advance([], Ending(EndReason.ABORT))
            return
        self.handles[:] = client.requests.add([entry], [state])
        self._handle_of[state] = entry.handle
        kept.sent(client, entry)

    def cancel_turn(self) -> bool:
        """See `KeptRequest.cancel_turn`; False if it is no turn of a session."""
        return self._kept is not None and self._kept.cancel_turn()

    def withdraw(self, client: EngineClient) -> None:
        if len(self.handles) > 1:
            client.requests.abort(self.handles, engine_pb2.ABORT_REASON_MIGRATED)

    def on_move(self, move: Move) -> None:
        self._trace.note_migration(move, self.num_sampled_tokens)

    def fail(self, error: ServiceError) -> None:
        self.states[0].collector.fail(too_late() if self._caller.is_late() else error)

    def content(self) -> Content:
        prepared = self._prepared
        return content_of(self._caller.identity.account, prepared.prompt.model.name, prepared.entries)

    def remaining_s(self) -> float | None:
        return self._caller.remaining_s()

    def _hint_ends(self, hint_of: Callable[[str | None], session_pb2.FinishHint]) -> None:
        """Have the engine know what each output calls, once it has ended."""

        def on_ended(state: RequestState, called: str | None) -> None:
            handle = self._handle_of.get(state)
            if self._client is not None and handle is not None:
                # Behind the abort of an output that a stop string has ended, which is sent in this turn.
                asyncio.get_running_loop().call_soon(self._client.requests.hint, handle, hint_of(called))

        for state in self.states:
            state.on_ended = functools.partial(on_ended, state)


def make_states(
    request: AnyRequest,
    source: Prompt,
    prepared: Prepared,
    kind: OutputKind,
    *,
    stream_interval: int,
    limit: ReaderLimit,
    on_slow: Callable[[], None],
) -> list[RequestState]:
    """One state for each output of `prepared`, set up for what `request` asks for; `source` is its prompt."""
    n, prompt, sampling = len(prepared.entries), prepared.prompt, request.sampling
    readers = [
        [reader for option in OPTIONS if (reader := option.reader(request, prompt, index)) is not None]
        for index in range(n)
    ]
    collector = Collector(
        kind,
        n,
        stream_interval=stream_interval,
        limit=limit,
        on_slow=on_slow,
        awaits_first=any(reader.is_awaited for reader in readers[0]),
    )
    skips_special = sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
    has_spaces = (
        not sampling.HasField("spaces_between_special_tokens") or sampling.spaces_between_special_tokens
    )
    include = sampling.include_stop_in_output
    stops_in_content = isinstance(request, chat_message_pb2.ChatRequest) and not request.stop_in_all_text
    states = []
    for index in range(n):
        detokenizer = None
        if has_text(sampling):
            detokenizer = prompt.model.tokenizer.detokenizer(
                prompt.context_ids,
                skip_special_tokens=skips_special,
                spaces_between_special_tokens=has_spaces,
                markers=source.markers,
            )
        states.append(
            RequestState(
                collector,
                detokenizer,
                StopBuffer(sampling.stop, include=include) if sampling.stop else None,
                include_stop=include,
                min_tokens=sampling.min_tokens,
                parser=source.parser(streams=kind is OutputKind.DELTA),
                stops_in_content=stops_in_content,
                index=index,
                logprobs=next(
                    filter(None, (option.token_reader(request, prompt) for option in OPTIONS)), None
                ),
                readers=readers[index],
            )
        )
    return states
