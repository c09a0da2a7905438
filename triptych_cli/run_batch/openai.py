"""Converts OpenAI batch bodies to requests, as the HTTP API does, and answers to OpenAI's response bodies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from frontend_svc.protocols.openai.answers import (
    are_whole,
    assistant_of,
    columns_of,
    fingerprint_of,
    prompt_of,
    tokens_of,
    usage_of,
)
from frontend_svc.protocols.openai.bodies import ChatBody, CompletionBody, SamplingBody, read_object
from frontend_svc.protocols.openai.requests import (
    chat_names,
    chat_request,
    completion_names,
    generate_requests,
)
from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2
from triptych_cli.verbs.generation import reason_name
from triptych_kit.errors import InvalidArgument, Unimplemented

# The call by URL.
OPENAI_URLS: Mapping[str, str] = {"/v1/completions": "generate", "/v1/chat/completions": "chat"}

# Fields of a body that concern how an answer is sent; that of a line is whole, without ids.
_OF_SENDING = ("stream", "return_token_ids", "echo")


def from_openai(
    url: str, body: Mapping[str, Any]
) -> generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest:
    """The request of a line; raises InvalidArgument with the field's name.

    A field that is null counts as unset, as in OpenAI's API.
    """
    try:
        if OPENAI_URLS[url] == "chat":
            chat, ignored = read_object(body, ChatBody)
            _refuse_sending(chat)
            if not chat.include_reasoning:
                raise InvalidArgument(
                    "include_reasoning is not served: a line has the whole answer alone",
                    field="include_reasoning",
                )
            return chat_request(chat, ignored, chat_names())
        completion, _ = read_object(body, CompletionBody)
        _refuse_sending(completion)
        requests = generate_requests(completion, completion_names())
    except Unimplemented as error:
        # The result of a line names fields as those of wrong ones.
        raise InvalidArgument(error.message, field=error.metadata.get("field")) from error
    if len(requests) != 1:
        raise InvalidArgument(f"prompt has {len(requests)} prompts, and a line has one", field="prompt")
    return requests[0]


def _refuse_sending(body: SamplingBody) -> None:
    for name in _OF_SENDING:
        if getattr(body, name, None):
            raise InvalidArgument(f"{name} is not served: a line has the whole answer alone", field=name)


def to_openai(answer: inference_pb2.GenerateUnaryResponse | chat_pb2.ChatUnaryResponse) -> dict[str, Any]:
    """The response of OpenAI's batch API for an answer."""
    is_chat = isinstance(answer, chat_pb2.ChatUnaryResponse)
    of_prompt = prompt_of(answer.started)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer.started.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": answer.started.model,
        "system_fingerprint": fingerprint_of(answer.started),
        "choices": [_choice(output) | ({} if is_chat else of_prompt) for output in answer.outputs],
        "usage": usage_of(answer.usage),
        **(of_prompt if is_chat else {}),
    }
    return {"status_code": 200, "request_id": answer.started.request_id, "body": body}


def _choice(output: generate_pb2.Output | chat_message_pb2.ChatOutput) -> dict[str, Any]:
    reason = reason_name(output.reason)
    has_logprobs = output.HasField("logprobs")
    choice: dict[str, Any] = {"index": output.output_index}
    if isinstance(output, generate_pb2.Output):
        choice |= {"text": output.text, "logprobs": columns_of(output.logprobs) if has_logprobs else None}
    else:
        message = assistant_of(output.message)
        if are_whole(output.message.tool_calls) and reason == "stop":
            reason = "tool_calls"
        content = {"content": tokens_of(output.logprobs)} if has_logprobs else None
        choice |= {"message": message, "logprobs": content}
    # OpenAI has no reason for an output that repeats itself; it is an end by the server, too.
    return choice | {"finish_reason": "stop" if reason == "repetition" else reason}
