"""Takes over orphaned requests, whose own frontend has gone, from one engine.

Knows no text: outputs of a request are held until there is a state that takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from frontend_svc.engines.connection.connection import ADOPT, EngineConnection
from frontend_svc.output.collector import Ending
from frontend_svc.output.engine_times import Progress
from frontend_svc.output.logprobs import LogprobColumns
from frontend_svc.output.loss import RETRY_AFTER_MS, Loss
from frontend_svc.output.processor import OutputProcessor
from frontend_svc.output.request_state import RequestState
from triptych.engine.v1 import engine_pb2, step_pb2
from triptych_kit.errors import ServiceError, Unavailable

_ANSWER_LIMIT_S = 2.0
# About the memory that a token takes while it waits for its reader, and each alternative of its logprobs.
_TOKEN_BYTES = 512
_ALTERNATIVE_BYTES = 32


class HeldOutputs:
    """Receives the outputs of one request until its state has been made."""

    wants_logprobs = True
    has_stop_strings = True  # as the state may have some

    def __init__(self) -> None:
        self.num_tokens = 0
        self.size_bytes = 0  # upper bound, for when they wait for a reader
        self._calls: list[Callable[[RequestState], object]] = []
        self._has_ended = False
        self._lost: Loss | ServiceError | None = None

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None:
        self.num_tokens += len(token_ids)
        self.size_bytes += _TOKEN_BYTES * len(token_ids)
        if columns is not None:
            self.size_bytes += _ALTERNATIVE_BYTES * len(columns.top_ids)
        self._has_ended = ending is not None
        self._calls.append(
            lambda state: None if state.has_ended else state.advance(token_ids, ending, columns)
        )
        return ending

    def note_cached(self, num_cached_tokens: int) -> None:
        self._calls.append(lambda state: state.note_cached(num_cached_tokens))

    def note_progress(self, progress: Progress) -> None:
        self._calls.append(lambda state: state.note_progress(progress))

    def add_extra(self, extra: step_pb2.StepExtra) -> None:
        self._calls.append(lambda state: state.add_extra(extra))

    def fail(self, error: ServiceError) -> None:
        self._lost = error

    def lose(self, loss: Loss) -> None:
        self._lost = loss

    def release(self, state: RequestState) -> bool:
        """Pass all outputs to `state`. True if that ended it although the engine still runs it."""
        for call in self._calls:
            call(state)
        self._calls.clear()
        return state.has_ended and not self._has_ended

    def release_loss(self, state: RequestState) -> None:
        """Pass the error or the loss to `state`, if there is one."""
        if state.has_ended:
            return
        if isinstance(self._lost, Loss):
            state.lose(self._lost)
        elif self._lost is not None:
            state.fail(self._lost)


@dataclass(frozen=True, slots=True)
class Adoptee:
    """One request that was taken over: its state at that time, and its outputs."""

    handle: int
    attempt: int
    prompt_token_ids: bytes
    resume_state: bytes
    outputs: HeldOutputs


class EngineAdoptions:
    """Adopt requests to one engine that it has not answered yet. `abort` ends a request in the engine."""

    def __init__(
        self,
        connection: EngineConnection,
        processor: OutputProcessor,
        handles: Iterator[int],
        abort: Callable[[Iterable[int], engine_pb2.AbortReason], None],
    ) -> None:
        self._connection = connection
        self._processor = processor
        self._handles = handles
        self._abort = abort
        self.are_left = False  # whether adopted requests without a reader are left to the next frontend
        self._answers: dict[int, asyncio.Future[Adoptee]] = {}

    @property
    def are_possible(self) -> bool:
        """Whether the engine supports adoption."""
        return ADOPT in self._connection.ack.features

    async def ask(self, request_id: str) -> Adoptee:
        """Take over the request whose ADD had this id. The caller hands it over or aborts it.

        Raises the engine's error if it rejects this, Unavailable if it does not answer.
        """
        handle = next(self._handles) & 0xFFFFFFFF
        answer: asyncio.Future[Adoptee] = asyncio.get_running_loop().create_future()
        self._answers[handle] = answer
        entry = engine_pb2.AdoptEntry(handle=handle, request_id=request_id)
        self._connection.session.adopt(entry)
        self._connection.send(engine_pb2.ConnectRequest(adopt=engine_pb2.Adopt(entries=[entry])))
        try:
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                return await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            # The answer may have arrived at the moment of the timeout or the cancellation.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._abandon(handle)
            if isinstance(error, TimeoutError):
                raise _unanswered(f"no answer within {_ANSWER_LIMIT_S:g} s") from error
            raise
        finally:
            del self._answers[handle]

    def hand_over(self, adoptees: Iterable[tuple[Adoptee, RequestState]]) -> None:
        """Pass the held outputs of each to its state, which receives all later outputs."""
        pairs = list(adoptees)
        for adoptee, state in pairs:
            self._processor.hand_over(adoptee.handle, state)
            if adoptee.outputs.release(state):
                self._abort([adoptee.handle], engine_pb2.ABORT_REASON_STOP_STRING)
        # After all outputs: a state that gets a loss looks at its whole group.
        for adoptee, state in pairs:
            adoptee.outputs.release_loss(state)

    def leave(self, handles: Iterable[int]) -> None:
        """Forget requests here only: the engine continues them, and another frontend may adopt them."""
        for handle in handles:
            self._processor.forget(handle)

    def on_adopted(self, adopted: engine_pb2.Adopted) -> None:
        """The engine has handed over a request; it is registered before the next message is read."""
        handle = adopted.handle
        self._connection.session.on_adopted(handle, adopted.attempt)
        outputs = HeldOutputs()
        self._processor.register(handle, outputs)
        answer = self._answers.get(handle)
        if answer is None or answer.done():
            # The call of `ask` has ended.
            self._abandon(handle)
            return
        answer.set_result(
            Adoptee(handle, adopted.attempt, adopted.prompt_token_ids, adopted.resume_state, outputs)
        )

    def on_rejected(self, handle: int, error: ServiceError) -> None:
        """The engine has rejected a request; harmless for a handle without a waiting `ask`."""
        answer = self._answers.get(handle)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def lose(self, reason: str) -> None:
        """The engine is lost: fail all requests that it has not answered."""
        for handle in list(self._answers):
            self.on_rejected(handle, _unanswered(reason))

    def _abandon(self, handle: int) -> None:
        if not self.are_left:
            self._abort([handle], engine_pb2.ABORT_REASON_CLIENT)


def _unanswered(reason: str) -> Unavailable:
    return Unavailable(
        f"the engine was asked for a request: {reason}", reason="NOT_ADOPTED", retry_after_ms=RETRY_AFTER_MS
    )
