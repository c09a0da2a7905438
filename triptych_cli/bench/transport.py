"""How a load reaches a server: what a request is in bytes, and what comes back. The gRPC one is ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_cli.bench.metrics import OK

_METHOD = "/triptych.api.v1.InferenceService/Generate"

# Any other end is a failure: the server gave up the output.
_COMPLETE = frozenset(
    {
        output_pb2.FINISH_REASON_STOP,
        output_pb2.FINISH_REASON_LENGTH,
        output_pb2.FINISH_REASON_REPETITION,
    }
)


class AnswerFailed(Exception):
    """A request was refused or its answer ended early; `code` is the name of a status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """The facts of a model that prompts are drawn by. max_model_len: None if the server does not say it."""

    name: str
    vocab_size: int
    left_out: Sequence[int]
    max_model_len: int | None


@dataclass(slots=True)
class Part:
    """One message of an answer.

    token_ids: empty if the server does not send ids.  code: of the end of the answer; empty before.
    num_uncounted: tokens of the answer beyond those of its parts, where a server counts at the end alone.
    """

    num_tokens: int = 0
    token_ids: Sequence[int] = ()
    code: str = ""
    num_cached_tokens: int = 0
    num_uncounted: int = 0


class Transport(Protocol):
    """Serializes requests beforehand, and sends them when they are due."""

    def build(self, token_ids: Sequence[int], num_output_tokens: int, index: int) -> bytes:
        """A serialized request; its seed is derived from `index`."""
        ...

    def answer(self, request: bytes, index: int, timeout_s: float) -> AsyncGenerator[Part, None]:
        """Send a request; the last part has a code. Raises AnswerFailed."""
        ...


class RequestBuilder:
    """Serializes requests of gRPC that differ only in prompt, length and seed."""

    def __init__(self, model: str, sampling: sampling_pb2.SamplingParams, seed: int) -> None:
        self._model = model
        self._sampling = sampling
        self._seed = seed

    def build(self, token_ids: Sequence[int], num_output_tokens: int, index: int) -> bytes:
        """A serialized GenerateRequest; its seed is derived from `index`."""
        request = generate_pb2.GenerateRequest(
            model=self._model, token_ids=generate_pb2.TokenIds(ids=token_ids), sampling=self._sampling
        )
        request.sampling.max_tokens = num_output_tokens
        request.sampling.seed = self._seed + index
        return request.SerializeToString()


class GRPCTransport:
    """Sends requests over the given channels, used in turns."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], builder: RequestBuilder) -> None:
        # Requests are serialized beforehand, so that this does not delay the timestamps of others.
        self._calls = [
            channel.unary_stream(_METHOD, bytes, generate_pb2.GenerateResponse.FromString)
            for channel in channels
        ]
        self.build = builder.build

    async def answer(self, request: bytes, index: int, timeout_s: float) -> AsyncGenerator[Part, None]:
        call = self._calls[index % len(self._calls)](request, timeout=timeout_s)
        try:
            async for response in call:
                kind = response.WhichOneof("event")
                if kind == "delta":
                    ids = response.delta.token_ids
                    yield Part(len(ids), ids)
                elif kind == "finished":
                    reason = response.finished.reason
                    code = OK if reason in _COMPLETE else output_pb2.FinishReason.Name(reason)
                    yield Part(code=code, num_cached_tokens=response.finished.usage.num_cached_tokens)
        except grpc.aio.AioRpcError as error:
            raise AnswerFailed(error.code().name, error.details() or "") from error
        finally:
            call.cancel()
