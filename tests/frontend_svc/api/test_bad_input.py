"""What cannot be, or is not served, is refused by field, value and limit, beside running streams."""

from __future__ import annotations

import io
import math

import grpc
import pytest

from tests.frontend_svc.fakes import (
    AT_LENGTH,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    WAIT_S,
    FakeEngine,
    details_of,
    make_request,
    read_all,
    serving,
    serving_one,
)
from triptych.api.v1 import generate_pb2
from triptych_kit.telemetry.logs import setup_logs
from triptych_kit.telemetry.traces import recent_spans, setup_telemetry, shutdown_telemetry

NAN, LONG = math.nan, [5] * MAX_MODEL_LEN
BAD_INPUT = {
    "empty prompt": (make_request(""), "INVALID_ARGUMENT", ["prompt", "empty"]),
    "no ids": (make_request([]), "INVALID_ARGUMENT", ["token_ids", "empty"]),
    "unknown model": (make_request("x", model="gpt-9"), "NOT_FOUND", ["gpt-9", "tiny"]),
    "nan": (make_request("x", temperature=NAN), "INVALID_ARGUMENT", ["sampling.temperature", "nan", "0..2"]),
    "no tokens": (make_request("x", max_tokens=0), "INVALID_ARGUMENT", ["sampling.max_tokens", "0", "1"]),
    "too many": (
        make_request([5] * 500, max_tokens=13),
        "INVALID_ARGUMENT",
        ["max_tokens", "13", "12", "512"],
    ),
    "huge": (make_request("x", max_tokens=2**40), "INVALID_ARGUMENT", ["sampling.max_tokens", str(2**40)]),
    "out of vocabulary": (
        make_request([1, VOCAB_SIZE]),
        "INVALID_ARGUMENT",
        ["token_ids[1]", str(VOCAB_SIZE)],
    ),
    "too long": (make_request(LONG), "INVALID_ARGUMENT", ["CONTEXT_LENGTH_EXCEEDED", "512"]),
    "too long text": (make_request("a" * 100_000), "INVALID_ARGUMENT", ["CONTEXT_LENGTH_EXCEEDED", "512"]),
    "priority": (make_request("x", priority=101), "INVALID_ARGUMENT", ["priority", "101", "-100..100"]),
    "two": (make_request("", top_p=7.0), "INVALID_ARGUMENT", ["prompt", "sampling.top_p"]),
    "greedy n": (make_request("x", n=2, temperature=0.0), "INVALID_ARGUMENT", ["sampling.n is 2", "1"]),
    "grammar": (
        make_request("x", structured_output={"regex": "a"}),
        "UNIMPLEMENTED",
        ["sampling.structured_output"],
    ),
    "bad words": (make_request("x", bad_words=["y", ""]), "INVALID_ARGUMENT", ["sampling.bad_words[1]"]),
    "adapter": (make_request("x", adapter="lora"), "NOT_FOUND", ["adapter 'lora' of model 'tiny'"]),
    "adapter's name": (make_request("x", adapter="a" * 65), "INVALID_ARGUMENT", ["adapter", "65", "64"]),
    "job": (make_request("x", job_id="j" * 257), "INVALID_ARGUMENT", ["job_id", "257", "256"]),
    "job's NUL": (make_request("x", job_id="j\0"), "INVALID_ARGUMENT", ["job_id", "printed"]),
    "rank": (make_request("x", data_parallel_rank=1), "UNAVAILABLE", ["data_parallel_rank 1", "[0]"]),
    "no rank": (
        make_request("x", data_parallel_rank=5),
        "INVALID_ARGUMENT",
        ["data_parallel_rank", "5", "0..1"],
    ),
    "wide rank": (
        make_request("x", data_parallel_rank=2**40),
        "INVALID_ARGUMENT",
        ["data_parallel_rank", str(2**40), "0..4294967295"],
    ),
    "no input": (
        # max_tokens and temperature alone.
        generate_pb2.GenerateRequest.FromString(bytes.fromhex("2a0748050d00000000")),
        "INVALID_ARGUMENT",
        ["input is not set, must be one of prompt, token_ids, embeds"],
    ),
    "enum": (
        make_request("x", output_kind=9),
        "INVALID_ARGUMENT",
        ["sampling.output_kind is 9, must be one of", "OUTPUT_KIND_DELTA", "OUTPUT_KIND_FINAL_ONLY"],
    ),
}


async def test_bad_input_is_refused_by_name_beside_running_streams():
    async with serving_one() as (engine, client, _):
        good = [client.generate() for _ in range(8)]
        requests = list(await engine.wait_for_requests(8))
        for name, (request, code, expected) in BAD_INPUT.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(client.inference.Generate(request, timeout=WAIT_S))
            message = f"{caught.value.details()} {details_of(caught.value)}"
            assert caught.value.code().name == code, (name, message)
            for words in expected:
                assert words in message, (name, message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.inference.Generate(make_request("x" * 20_000_000), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for index, request in enumerate(requests):
            engine.step({request: [5 + index]}, finished={request: AT_LENGTH})
        # Calls reach the engine in any order.
        answers = [(await read_all(call))[2] for call in good]
        assert sorted(answers) == [[5 + index] for index in range(8)]
    assert len(engine.requests) == 8


async def test_of_an_id_that_is_refused_for_its_length_spans_and_logs_keep_the_beginning():
    setup_telemetry("frontend", instance="0")
    log = io.StringIO()
    setup_logs("frontend", instance="0", log_format="text", log_level="info", stream=log)
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    metadata = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate(metadata=metadata, request_id="i" * 100_000))
    (span,) = (span for span in recent_spans(trace_id) if span.name == "text_completion")
    shutdown_telemetry()
    (line,) = (line for line in log.getvalue().splitlines() if "InferenceService/Generate" in line)
    assert "request_id has 100000 characters, must have at most 128" in details_of(caught.value)
    assert span.attributes["triptych.request_id"] == "i" * 128
    assert f"request_id={'i' * 128} " in line
