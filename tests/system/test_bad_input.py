"""Bad input costs one precise status, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.system.checkpoints import MAX_POSITIONS, VOCAB_SIZE, Reference
from tests.system.generation import collect, random_prompt, request_of
from tests.system.stack import Stack
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NUM_RUNNING = 8
MAX_TOKENS = 250


def _bad_requests() -> dict[str, tuple[generate_pb2.GenerateRequest, grpc.StatusCode, str, tuple[str, ...]]]:
    """By name: the request, the status, the field at fault, and what the message must name."""

    def sampling(**fields: object) -> generate_pb2.GenerateRequest:
        return generate_pb2.GenerateRequest(prompt="the fox", sampling=sampling_pb2.SamplingParams(**fields))

    return {
        "empty prompt": (generate_pb2.GenerateRequest(prompt=""), INVALID, "prompt", ()),
        "no prompt": (generate_pb2.GenerateRequest(), INVALID, "input", ()),
        "unknown model": (
            generate_pb2.GenerateRequest(model="nobody", prompt="the fox"),
            grpc.StatusCode.NOT_FOUND,
            "",
            ("nobody",),
        ),
        "temperature not a number": (
            sampling(temperature=float("nan")),
            INVALID,
            "sampling.temperature",
            ("nan",),
        ),
        "temperature too high": (sampling(temperature=2.5), INVALID, "sampling.temperature", ("2.5", "2")),
        "no tokens": (sampling(max_tokens=0), INVALID, "sampling.max_tokens", ("0", "1")),
        "ids out of vocabulary": (request_of([1, VOCAB_SIZE], 4), INVALID, "token_ids", (str(VOCAB_SIZE),)),
        "prompt too long": (
            request_of([1] * (MAX_POSITIONS + 5), 4),
            INVALID,
            "token_ids",
            (str(MAX_POSITIONS + 5), str(MAX_POSITIONS)),
        ),
        "too many stop strings": (sampling(stop=["x"] * 10_000), INVALID, "sampling.stop", ("10000", "16")),
        "a message of 20 MB": (
            generate_pb2.GenerateRequest(prompt="x" * 20_000_000),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "",
            ("16777216",),
        ),
    }


async def test_bad_input_names_field_value_and_limit_and_disturbs_nobody(llama: str) -> None:
    rng = random.Random(9)
    prompts = [random_prompt(rng, 12, VOCAB_SIZE) for _ in range(NUM_RUNNING)]
    async with Stack() as stack:
        trio = await stack.start_all(llama)
        stub = stack.inference(trio.frontend)
        running = [asyncio.ensure_future(collect(stub, request_of(prompt, MAX_TOKENS))) for prompt in prompts]
        # Asked too seldom, the first may have ended already; what is held to is that each ends well.
        await stack.engine(trio.engine).until(
            lambda stats: stats.num_running + stats.num_finished == NUM_RUNNING
        )
        for name, (request, code, field, named) in _bad_requests().items():
            error = await _failure(stack, trio.frontend, request)
            assert error.code() is code, name
            text = error.details() or ""
            assert all(word in text for word in named), f"{name}: {text}"
            if field:
                assert field in {violation.field for violation in _violations(error)}, f"{name}: {text}"
        answers = await asyncio.gather(*running)
    reference = Reference(Path(llama))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert reference.generate(prompt, MAX_TOKENS).first_real_difference(answer.token_ids) is None


async def _failure(
    stack: Stack, frontend: object, request: generate_pb2.GenerateRequest
) -> grpc.aio.AioRpcError:
    try:
        await collect(stack.inference(frontend), request)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the request was accepted")


def _violations(error: grpc.aio.AioRpcError) -> list[error_details_pb2.BadRequest.FieldViolation]:
    status = rpc_status.from_call(error)
    violations: list[error_details_pb2.BadRequest.FieldViolation] = []
    for detail in status.details if status else ():
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            violations.extend(bad_request.field_violations)
    return violations
