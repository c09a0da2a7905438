"""A client of GenerateSession, and whether its turns have the ids of requests for all tokens before them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from tests.system.generation import CALL_LIMIT_S, read_to_end
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_kit.eager_writer import EagerWriter

Message = inference_pb2.GenerateSessionRequest
Stub = inference_pb2_grpc.InferenceServiceStub

# Ends of a turn that has less than it would have by itself; also of one that its client has not read whole.
_CUT = (output_pb2.FINISH_REASON_UNSPECIFIED, output_pb2.FINISH_REASON_ABORT)
_BY_TOKEN = ("token_id", "eos")


@dataclass
class Turn:
    """What a session has answered to an input. `added` are its ids; None: it is a text."""

    sampling: sampling_pb2.SamplingParams
    added: list[int] | None = None
    prompt: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    finished: generate_pb2.Finished = field(default_factory=generate_pb2.Finished)
    has_next: bool = True
    is_cancelled: bool = False

    @property
    def reason(self) -> output_pb2.FinishReason:
        return self.finished.reason

    @property
    def context(self) -> list[int]:
        """The tokens that the next turn continues."""
        is_by_token = self.finished.stop_match.WhichOneof("match") in _BY_TOKEN
        return self.prompt + self.token_ids[: len(self.token_ids) - is_by_token]


class Session:
    """A call of GenerateSession.

    sampling: of all its turns, but for their lengths.  start: fields of its start.
    """

    def __init__(
        self,
        stub: Stub,
        sampling: sampling_pb2.SamplingParams,
        *,
        timeout: float = CALL_LIMIT_S,
        **start: str,
    ) -> None:
        self.sampling = sampling
        self.turns: list[Turn] = []
        self.call = stub.GenerateSession(timeout=timeout)
        # After a failed write of the call itself, its status could not be read.
        self._writer: EagerWriter[Message] = EagerWriter(self.call.write)
        self._start = start

    async def add(self, prompt: str | Sequence[int], max_tokens: int) -> Turn:
        """Send an input; its turn is filled by `read`."""
        is_text = isinstance(prompt, str)
        turn = Turn(sampling_pb2.SamplingParams(), None if is_text else list(prompt))
        turn.sampling.CopyFrom(self.sampling)
        turn.sampling.max_tokens = max_tokens
        self.turns.append(turn)
        input_ = {"prompt": prompt} if is_text else {"token_ids": {"ids": prompt}}
        if len(self.turns) == 1:
            start = generate_pb2.GenerateRequest(
                sampling=turn.sampling, return_prompt_token_ids=True, **input_, **self._start
            )
            await self._write(Message(start=start))
        else:
            await self._write(Message(append={"sampling": turn.sampling, **input_}))
        return turn

    async def read(self, turn: Turn, *, num_tokens: int | None = None) -> None:
        """Read to the end of a turn, or until it has some tokens."""
        while turn.reason == output_pb2.FINISH_REASON_UNSPECIFIED:
            if num_tokens is not None and len(turn.token_ids) >= num_tokens:
                return
            message = await self.call.read()
            response = message.response
            if response.HasField("started"):
                turn.prompt = list(response.started.prompt_token_ids)
                turn.num_cached_tokens = response.started.num_cached_tokens
            turn.token_ids += response.delta.token_ids
            if response.HasField("finished"):
                turn.finished, turn.has_next = response.finished, message.turn_ended

    async def cancel_turn(self) -> None:
        self.turns[-1].is_cancelled = True
        await self._write(Message(cancel_turn={}))

    @property
    def is_over(self) -> bool:
        """Whether a turn has ended that no other may follow."""
        return not all(turn.has_next for turn in self.turns)

    async def send_end(self) -> None:
        """No more input follows the present turn."""
        await self._write(Message(end={}))

    async def end(self) -> None:
        await self.send_end()
        await read_to_end(self.call)

    async def _write(self, message: Message) -> None:
        """Where the call is over, what is read says why."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            self._writer.start(message)
            await self._writer.finish()


async def differences(stub: Stub, sessions: Sequence[Session]) -> list[str]:
    """The turns that differ from requests for the same tokens, computed without what is cached."""
    found: list[str] = []
    for session in sessions:
        context: list[int] = []
        for number, turn in enumerate(session.turns):
            if not turn.prompt:
                break  # it was not begun
            if turn.prompt[: len(context)] != context:
                found.append(f"turn {number} continues {turn.prompt}, not {context}")
            elif turn.added is not None and turn.prompt[len(context) :] != turn.added:
                found.append(f"turn {number} has {turn.prompt[len(context) :]}, not {turn.added}")
            if turn.reason == output_pb2.FINISH_REASON_ABORT and turn.has_next and not turn.is_cancelled:
                found.append(f"turn {number} ends by ABORT, and was not cancelled")
            found += await _difference(stub, turn, number)
            context = turn.context
    return found


async def _difference(stub: Stub, turn: Turn, number: int) -> list[str]:
    request = generate_pb2.GenerateRequest(token_ids={"ids": turn.prompt}, sampling=turn.sampling)
    request.sampling.skip_reading_prefix_cache = True
    token_ids: list[int] = []
    finished = generate_pb2.Finished()
    async for response in stub.Generate(request, timeout=CALL_LIMIT_S):
        token_ids += response.delta.token_ids
        if response.HasField("finished"):
            finished = response.finished
    is_cut = turn.reason in _CUT
    expected = token_ids[: len(turn.token_ids)] if is_cut else token_ids
    if turn.token_ids != expected:
        return [f"turn {number} has the ids {turn.token_ids}, alone {token_ids}"]
    ends = [(one.reason, one.stop_match) for one in (turn.finished, finished)]
    return [] if is_cut or ends[0] == ends[1] else [f"turn {number} ends by {ends[0]}, alone by {ends[1]}"]
