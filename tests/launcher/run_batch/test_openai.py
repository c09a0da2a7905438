"""OpenAI's batch lines as requests of this API."""

from __future__ import annotations

import json

import pytest

from launcher.run_batch.line import read_line
from service_kit.errors import InvalidArgument
from triptych.api.v1 import chat_message_pb2

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def request_of(url: str, **body):
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    return read_line(1, json.dumps(line).encode(), "").request


def test_a_completion_keeps_every_common_field() -> None:
    request = request_of(
        COMPLETIONS,
        model="m",
        prompt="hi",
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        n=2,
        stop=["a", "b"],
        seed=7,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logprobs=3,
    )
    sampling = request.sampling
    assert (request.model, request.prompt) == ("m", "hi")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.n) == (9, 0.5, 0.25, 2)
    assert (list(sampling.stop), sampling.seed, sampling.logprobs) == (["a", "b"], 7, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)


def test_a_prompt_may_be_ids_and_a_stop_one_text() -> None:
    request = request_of(COMPLETIONS, prompt=[1, 2], stop="x")
    assert list(request.token_ids.ids) == [1, 2]
    assert list(request.sampling.stop) == ["x"]


def test_a_completion_without_max_tokens_has_openais_default_and_a_chat_what_fits() -> None:
    assert request_of(COMPLETIONS, prompt="x").sampling.max_tokens == 16
    assert not request_of(CHAT, messages=[USER]).sampling.HasField("max_tokens")


def test_null_counts_as_left_out() -> None:
    request = request_of(CHAT, messages=[USER], temperature=None, suffix=None)
    assert not request.sampling.HasField("temperature")


def test_a_conversation_keeps_roles_parts_calls_and_answers() -> None:
    request = request_of(
        CHAT,
        messages=[
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "lee",
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        ],
    )
    assert isinstance(request, chat_message_pb2.ChatRequest)
    system, user, assistant, tool = request.messages
    assert system.role == chat_message_pb2.CHAT_ROLE_SYSTEM
    assert ([part.text for part in user.parts], user.name) == (["a", "b"], "lee")
    [call] = assistant.tool_calls
    assert (call.id, call.name, call.arguments_json) == ("c1", "f", "{}")
    assert (tool.role, tool.tool_call_id) == (chat_message_pb2.CHAT_ROLE_TOOL, "c1")


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": False}, None)],
)
def test_logprobs_of_a_chat_are_switched_and_counted_apart(fields: dict, logprobs: int | None) -> None:
    sampling = request_of(CHAT, messages=[USER], max_completion_tokens=5, **fields).sampling
    assert sampling.max_tokens == 5
    assert (sampling.logprobs if sampling.HasField("logprobs") else None) == logprobs


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "messages": []}, "messages"),
        (CHAT, {"messages": [USER], "tools": []}, "tools"),
        (CHAT, {"messages": [USER], "stream": True}, "stream"),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [USER], "logprobs": 2}, "logprobs"),
        (CHAT, {"messages": [USER], "max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0]",
        ),
        (CHAT, {"messages": [USER], "temperature": "hot"}, "body"),
    ],
)
def test_what_is_not_served_or_wrong_is_refused_by_name(url: str, body: dict, field: str) -> None:
    refused = request_of(url, **body)
    assert isinstance(refused, InvalidArgument)
    assert [name for name, _ in refused.violations] == [field]
