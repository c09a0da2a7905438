"""Bodies of answers over HTTP have whatever a request of their API can ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest

from frontend_svc.protocols.openai.answers import (
    chat_choice,
    columns_of,
    tokens_of,
    whole_chat,
    whole_completion,
)
from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2
from triptych.common.v1 import output_pb2
from triptych_cli.run_batch.openai import to_openai

PROMPT = output_pb2.Logprobs(
    token_ids=[5, 6, 7],
    logprobs=[math.nan, -3.0, -math.inf],
    ranks=[0, 9, 1],
    texts=["a", "b", "c"],
    top=[
        output_pb2.TopLogprobs(),
        output_pb2.TopLogprobs(token_ids=[8, 6], logprobs=[-1.0, -3.0], texts=["d", "b"]),
        output_pb2.TopLogprobs(token_ids=[7], logprobs=[-math.inf], texts=["c"]),
    ],
)
SHOWN = [
    None,
    {
        "6": {"logprob": -3.0, "rank": 9, "decoded_token": "b"},
        "8": {"logprob": -1.0, "rank": 1, "decoded_token": "d"},
    },
    {"7": {"logprob": -9999.0, "rank": 1, "decoded_token": "c"}},
]
STARTED = generate_pb2.Started(
    request_id="r", model="m", fingerprint="f", num_prompt_tokens=3, prompt_token_ids=[5, 6, 7],
    prompt_logprobs=PROMPT, resume_token="t", num_cached_tokens=1,
)  # fmt: skip
SAMPLED = output_pb2.Logprobs(token_ids=[9], logprobs=[-1.0], ranks=[1], texts=["e"])
USAGE = output_pb2.Usage(num_prompt_tokens=3, num_cached_tokens=1, num_completion_tokens=1)
COMMON = {
    "output_index": 1,
    "token_ids": [9],
    "logprobs": SAMPLED,
    "reason": output_pb2.FINISH_REASON_STOP,
    "stop_match": output_pb2.StopMatch(string="x"),
}
# Of no API over HTTP; usage has the counts of the prompt.
OF_GRPC = {"started.resume_token", "started.num_prompt_tokens", "started.num_cached_tokens"}


def completion() -> inference_pb2.GenerateUnaryResponse:
    output = generate_pb2.Output(text="e", **COMMON)
    return inference_pb2.GenerateUnaryResponse(started=STARTED, outputs=[output], usage=USAGE)


def chat() -> chat_pb2.ChatUnaryResponse:
    message = chat_message_pb2.ChatMessage(parts=[chat_message_pb2.ChatPart(text="e")])
    output = chat_message_pb2.ChatOutput(message=message, **COMMON)
    return chat_pb2.ChatUnaryResponse(started=STARTED, outputs=[output], usage=USAGE)


def shown(answer: Any) -> dict[str, Any]:
    if isinstance(answer, chat_pb2.ChatUnaryResponse):
        body = whole_chat(answer, with_ids=True)
    else:
        body = whole_completion([answer], with_ids=True, with_prompt_logprobs=True)
    return body | {"created": 0}


@pytest.mark.parametrize("make", [completion, chat])
def test_every_part_of_an_answer_is_in_its_body(make: Any) -> None:
    whole = shown(make())
    parts = {"started": make().started, "outputs": make().outputs[0]}
    for name, part in parts.items():
        for field, _ in part.ListFields():
            # The choices of a completion are numbered over all of its prompts.
            if f"{name}.{field.name}" in OF_GRPC | (
                {"outputs.output_index"} if make is completion else set()
            ):
                continue
            answer = make()
            (answer.started if name == "started" else answer.outputs[0]).ClearField(field.name)
            if field.name == "reason":
                answer.outputs[0].reason = output_pb2.FINISH_REASON_LENGTH
            assert shown(answer) != whole, field.name


def test_log_probabilities_and_ids_of_a_prompt_are_where_vllm_has_them() -> None:
    (choice,) = shown(completion())["choices"]
    for part in (choice, shown(chat())):
        assert (part["prompt_logprobs"], part["prompt_token_ids"]) == (SHOWN, [5, 6, 7])
    (of_line,) = to_openai(completion())["body"]["choices"]
    assert of_line["prompt_logprobs"] == to_openai(chat())["body"]["prompt_logprobs"] == SHOWN


def test_tokens_with_the_same_text_have_keys_of_their_own_and_the_own_one_is_among_them() -> None:
    logprobs = output_pb2.Logprobs(
        token_ids=[9, 7, 5, 4],
        logprobs=[-1.0, -9.0, -math.inf, math.nan],
        ranks=[3, 9, 9, 0],
        texts=["e", "", "x", "y"],
        top=[
            output_pb2.TopLogprobs(token_ids=[8, 6, 9], logprobs=[-0.1, -0.5, -1.0], texts=["e", "", "e"]),
            output_pb2.TopLogprobs(token_ids=[1, 2, 3], logprobs=[-0.1, -0.5, -1.0], texts=["", "", "a"]),
            output_pb2.TopLogprobs(),
            output_pb2.TopLogprobs(token_ids=[1], logprobs=[-0.1], texts=["a"]),
        ],
    )
    columns = columns_of(logprobs, offset=5)
    assert columns["top_logprobs"] == [
        {"token_id:8": pytest.approx(-0.1), "": -0.5, "e": -1.0},
        {"token_id:1": pytest.approx(-0.1), "token_id:2": -0.5, "a": -1.0, "": -9.0},
        {"x": -9999.0},
        None,
    ]
    assert columns["token_logprobs"] == [-1.0, -9.0, -9999.0, None]
    assert columns["text_offset"] == [5, 6, 6, 7]
    assert columns_of(SAMPLED)["top_logprobs"] == [{"e": -1.0}]
    assert tokens_of(logprobs)[2]["logprob"] == -9999.0


def test_reasoning_is_left_out_where_that_is_wanted() -> None:
    answer, delta = chat(), chat_message_pb2.ChatDelta(reasoning="r", content="e", token_ids=[9])
    answer.outputs[0].message.reasoning = "r"
    for with_reasoning, reasoning in ((True, {"reasoning_content": "r"}), (False, {})):
        (whole,) = whole_chat(answer, with_ids=True, with_reasoning=with_reasoning)["choices"]
        part = chat_choice(delta, with_ids=True, with_reasoning=with_reasoning)
        assert whole["message"] == {"role": "assistant", "content": "e", "refusal": None, **reasoning}
        assert part["delta"] == {"content": "e", **reasoning}


def test_log_probabilities_that_an_echo_is_made_of_are_left_out() -> None:
    body = whole_completion([completion()], with_ids=False, with_prompt_logprobs=False)
    assert "prompt_logprobs" not in body["choices"][0]
