"""Completions that repeat their prompts, as evaluation harnesses read loglikelihoods from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig.processes import Fleet, ServicePlan
from tests.frontend_svc.protocols.test_openai import HTTPClient
from triptych.api.v1 import generate_pb2, inference_pb2_grpc, tokenize_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel

LIMIT_S = 60
CONTEXT = "The box is blue. What colour is"
TEXTS = [f"{CONTEXT} the box?", f"{CONTEXT} 17 Zürich?"]
URL = "/v1/completions"


async def test_loglikelihoods_are_those_of_prompt_logprobs(tmp_path: Path) -> None:
    async with Fleet(tmp_path) as fleet:
        engine = fleet.add(ServicePlan("engine", 0, (str(embedded_model()), "--num-threads=1")))
        flags = (f"--engine={engine.address}", "--http-port=0", "--text-workers=1")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        client = HTTPClient(frontend.http)
        async with open_channel(frontend.address, profile="public") as channel:
            tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            inference = inference_pb2_grpc.InferenceServiceStub(channel)
            context, *prompts = [
                list((await tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text=text))).token_ids)
                for text in (CONTEXT, *TEXTS)
            ]
            answers = [
                await inference.GenerateOnce(prompt_request(prompt), timeout=LIMIT_S) for prompt in prompts
            ]
        # What lm-evaluation-harness sends.
        body = {
            "model": "", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
            "echo": True,
        }  # fmt: skip
        replies = [
            await client.post(URL, {**body, **more})
            for more in (
                {}, {"prompt": TEXTS}, {"max_tokens": 0}, {"max_tokens": 0, "stream": True},
                {"echo": False, "prompt_logprobs": 1, "return_token_ids": True},
            )
        ]  # fmt: skip
    by_ids, by_text, alone = [reply.body["choices"] for reply in replies[:3]]
    for choice, answer, text in zip(by_ids, answers, TEXTS, strict=True):
        expected = list(answer.started.prompt_logprobs.logprobs)
        columns = choice["logprobs"]
        assert len({len(column) for column in columns.values()}) == 1
        assert (columns["token_logprobs"][0], columns["top_logprobs"][0]) == (None, None)
        assert math.isnan(expected[0])
        assert loglikelihood(choice, len(context))[0] == pytest.approx(
            sum(expected[len(context) :]), rel=1e-4
        )
        assert choice["text"].startswith(text)
    assert [loglikelihood(choice, 1) for choice in by_text] == [loglikelihood(choice, 1) for choice in by_ids]
    for choice, text, prompt in zip(alone, TEXTS, prompts, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt)
    assert replies[2].body["usage"]["completion_tokens"] == 0
    for choice, answer, prompt in zip(replies[4].body["choices"], answers, prompts, strict=True):
        first, *values = choice["prompt_logprobs"]
        own = [each[str(token)]["logprob"] for each, token in zip(values, prompt[1:], strict=True)]
        assert (first, choice["prompt_token_ids"]) == (None, prompt)
        assert own == pytest.approx(list(answer.started.prompt_logprobs.logprobs)[1:], rel=1e-4)
    streamed = [event["choices"][0] for event in replies[3].events[:-1]]
    for whole in alone:
        parts = [part for part in streamed if part["index"] == whole["index"]]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert (parts[0]["logprobs"], parts[-1]["finish_reason"]) == (whole["logprobs"], "length")


def prompt_request(prompt: list[int]) -> generate_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling=sampling)


def loglikelihood(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """As lm-evaluation-harness reads a choice: the sum behind the context, and whether it is greedy."""
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"][num_context:-1]
    tops = logprobs["top_logprobs"][num_context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
