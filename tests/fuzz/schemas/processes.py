"""Checks drawn schemas through real processes: streams that vary, over gRPC, on the embedded model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import grpc

from tests.fuzz.schemas.draws import Draws
from tests.fuzz.schemas.exact import Unjudged, written
from tests.fuzz.schemas.walks import Report, wrong_output
from tests.system.generation import collect, request_of
from tests.system.stack import Stack
from triptych.api.v1 import inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_cli.services import embedded_model

MAX_TOKENS = 64
_NUM_STREAMS = 16
# The second where other schemas kept the process that rewrites them, on a busy machine.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)
_PROMPTS = ("The number is ", "Write JSON: ", '{"a": ', "0.", "[", '"', "Once upon a time")


async def check_schemas(seeds: range, report: Report) -> None:
    """Send a request with each schema, several at a time, and add what came of them to the report."""
    async with Stack() as stack:
        trio = await stack.start_all(str(embedded_model()), "--num-threads=1")
        stub = stack.inference(trio.frontend)
        open_seeds = iter(seeds)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_STREAMS):
                tasks.create_task(_send_all(stub, open_seeds, report))


async def _send_all(
    stub: inference_pb2_grpc.InferenceServiceStub, seeds: Iterator[int], report: Report
) -> None:
    for seed in seeds:
        draws, noise = Draws(seed), random.Random(f"{seed}/stream")
        text = written(draws.schema)
        request = request_of(
            noise.choice(_PROMPTS),
            noise.choice((8, 32, MAX_TOKENS)),
            ignore_eos=False,
            temperature=noise.choice((0.0, 0.7, 1.0, 2.0)),
            seed=seed,
        )
        request.sampling.structured_output.json_schema = text
        report.num_schemas += 1
        try:
            answer = await collect(stub, request)
        except grpc.aio.AioRpcError as error:
            report.outcomes[error.code().name] += 1
            if error.code() not in _REFUSALS:
                report.add(seed, "wrong status", text, f"{error.code().name}: {error.details()}")
            continue
        report.outcomes[output_pb2.FinishReason.Name(answer.reason)] += 1
        if answer.reason == output_pb2.FINISH_REASON_STOP:
            report.num_outputs += 1
            try:
                words = wrong_output(draws.schema, answer.text.encode())
            except Unjudged:
                continue
            if words:
                report.add(seed, "wrong output", text, f"{words}: {answer.text}")
        elif answer.reason != output_pb2.FINISH_REASON_LENGTH:
            report.add(seed, "wrong end", text, answer.text)
