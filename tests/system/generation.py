"""Requests as tests send them, and whole streams collected."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import grpc

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2

VOCAB_FIRST_PLAIN_ID = 1
CALL_LIMIT_S = 240.0


@dataclass
class Answer:
    """One whole stream."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: int = output_pb2.FINISH_REASON_UNSPECIFIED
    num_cached_tokens: int = 0
    num_finished: int = 0


def request_of(
    prompt: str | list[int],
    max_tokens: int,
    *,
    ignore_eos: bool = True,
    temperature: float = 0.0,
    seed: int | None = None,
) -> generate_pb2.GenerateRequest:
    """A request for `max_tokens` tokens, greedy by default."""
    sampling = sampling_pb2.SamplingParams(
        temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    if seed is not None:
        sampling.seed = seed
    if isinstance(prompt, str):
        return generate_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling=sampling)


async def collect(
    stub: inference_pb2_grpc.InferenceServiceStub, request: generate_pb2.GenerateRequest
) -> Answer:
    answer = Answer()
    async for response in stub.Generate(request, timeout=CALL_LIMIT_S):
        match response.WhichOneof("event"):
            case "started":
                answer.request_id = response.started.request_id
                answer.num_cached_tokens = response.started.num_cached_tokens
            case "delta":
                answer.text += response.delta.text
                answer.token_ids.extend(response.delta.token_ids)
            case "finished":
                answer.reason = response.finished.reason
                answer.num_finished += 1
    return answer


def random_prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    return [rng.randrange(VOCAB_FIRST_PLAIN_ID, vocab_size) for _ in range(num_tokens)]


async def read_to_end(call: grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall) -> None:
    """Read what is left of a stream that was begun with `read`; raises its status unless it is OK."""
    end = grpc.aio.EOF  # type: ignore[attr-defined]
    while await call.read() is not end:
        pass
