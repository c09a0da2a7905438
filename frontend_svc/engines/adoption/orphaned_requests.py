"""Requests that a frontend is asked for which did not send them: those whose own frontend is gone.

Knows no text: what an engine yields for one is held until there is a state that takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from frontend_svc.engines.connection.connection import ADOPT, EngineConnection
from frontend_svc.output.collector import Ending
from frontend_svc.output.logprobs import LogprobColumns
from frontend_svc.output.loss import RETRY_AFTER_MS, Loss
from frontend_svc.output.processor import OutputProcessor
from frontend_svc.output.request_state import RequestState
from service_kit.errors import ServiceError, Unavailable
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import engine_pb2

_ANSWER_LIMIT_S = 2.0
# About what is told of a token takes while it waits for its reader, and each of its alternatives.
_TOKEN_BYTES = 512
_ALTERNATIVE_BYTES = 32


class HeldOutputs:
    """Takes what comes of one request until its state is made, which takes a moment."""

    wants_logprobs = True

    def __init__(self) -> None:
        self.num_tokens = 0
        self.size_bytes = 0  # at most, once it waits for a reader
        self._calls: list[Callable[[RequestState], object]] = []
        self._has_ended = False
        self._lost: Loss | ServiceError | None = None

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None:
        """Hold one step's tokens; the end is that of the engine."""
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
        """Hold how much of the prompt came from the prefix cache."""
        self._calls.append(lambda state: state.note_cached(num_cached_tokens))

    def add_prompt_logprobs(self, first_position: int, columns: LogprobColumns) -> None:
        """Hold what a step tells of the prompt's places."""
        self._calls.append(lambda state: state.add_prompt_logprobs(first_position, columns))

    def add_pooled(self, tensor: tensor_pb2.Tensor) -> None:
        """Pass over a result of pooling: nobody asked for one."""

    def fail(self, error: ServiceError) -> None:
        """Hold the error that ends it."""
        self._lost = error

    def lose(self, loss: Loss) -> None:
        """Hold that the engine is lost."""
        self._lost = loss

    def release(self, state: RequestState) -> bool:
        """Give all output to `state`. True where that ended it, and the engine goes on with it."""
        for call in self._calls:
            call(state)
        self._calls.clear()
        return state.has_ended and not self._has_ended

    def release_loss(self, state: RequestState) -> None:
        """Tell `state` that nothing more comes, if that is so."""
        if state.has_ended:
            return
        if isinstance(self._lost, Loss):
            state.lose(self._lost)
        elif self._lost is not None:
            state.fail(self._lost)


@dataclass(frozen=True, slots=True)
class Adoptee:
    """One request that was taken over, as it stood then, and what has come of it."""

    handle: int
    attempt: int
    prompt_token_ids: bytes
    resume_state: bytes
    outputs: HeldOutputs


class EngineAdoptions:
    """What is asked of one engine, until it has answered.

    `send` writes a message if there is a stream, `abort` ends requests that nobody wants any more.
    """

    def __init__(
        self,
        line: EngineConnection,
        processor: OutputProcessor,
        handles: Iterator[int],
        send: Callable[[engine_pb2.ConnectRequest], None],
        abort: Callable[[Iterable[int], engine_pb2.AbortReason], None],
    ) -> None:
        self._connection = line
        self._processor = processor
        self._handles = handles
        self._send = send
        self._abort = abort
        self.are_left = False  # whether the next frontend may have what nobody here waits for any more
        self._asked: dict[int, asyncio.Future[Adoptee]] = {}

    @property
    def are_possible(self) -> bool:
        """Whether the engine understands what it would be asked."""
        return ADOPT in self._connection.ack.features

    async def ask(self, request_id: str) -> Adoptee:
        """Take over the request whose ADD had this id; it is to be handed over or aborted.

        Raises the engine's answer where it is no, Unavailable where none comes.
        """
        handle = next(self._handles) & 0xFFFFFFFF
        answer: asyncio.Future[Adoptee] = asyncio.get_running_loop().create_future()
        self._asked[handle] = answer
        entry = engine_pb2.AdoptEntry(handle=handle, request_id=request_id)
        self._connection.session.adopt(entry)
        self._send(engine_pb2.ConnectRequest(adopt=engine_pb2.Adopt(entries=[entry])))
        try:
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                return await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            # It may have come in the very moment in which nobody waits for it any more.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._abandon(handle)
            if isinstance(error, TimeoutError):
                raise _unanswered(f"no answer within {_ANSWER_LIMIT_S:g} s") from error
            raise
        finally:
            del self._asked[handle]

    def hand_over(self, adoptees: Iterable[tuple[Adoptee, RequestState]]) -> None:
        """Give each what has come to its state, which gets what comes from now on."""
        pairs = list(adoptees)
        for adoptee, state in pairs:
            self._processor.hand_over(adoptee.handle, state)
            if adoptee.outputs.release(state):
                self._abort([adoptee.handle], engine_pb2.ABORT_REASON_STOP_STRING)
        # Behind all output: whoever hears of a loss looks at the whole group.
        for adoptee, state in pairs:
            adoptee.outputs.release_loss(state)

    def take(self, adopted: engine_pb2.Adopted) -> None:
        """The engine has handed over a request. Registered before the next message can be of it."""
        handle = adopted.handle
        self._connection.session.adopted(handle, adopted.attempt)
        outputs = HeldOutputs()
        self._processor.register(handle, outputs)
        answer = self._asked.get(handle)
        if answer is None or answer.done():
            # Whoever asked has gone.
            self._abandon(handle)
            return
        answer.set_result(
            Adoptee(handle, adopted.attempt, adopted.prompt_token_ids, adopted.resume_state, outputs)
        )

    def refuse(self, handle: int, error: ServiceError) -> None:
        """The engine has answered no; harmless for a handle that nobody waits for."""
        answer = self._asked.get(handle)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _abandon(self, handle: int) -> None:
        if not self.are_left:
            self._abort([handle], engine_pb2.ABORT_REASON_CLIENT)

    def lose(self, reason: str) -> None:
        """No answer comes any more."""
        for handle in list(self._asked):
            self.refuse(handle, _unanswered(reason))


def _unanswered(reason: str) -> Unavailable:
    return Unavailable(
        f"the engine was asked for a request: {reason}", reason="NOT_ADOPTED", retry_after_ms=RETRY_AFTER_MS
    )
