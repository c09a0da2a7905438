"""Converts OpenAI batch bodies to JSON of this API's requests, and answers to OpenAI's response bodies.

Fields without a counterpart are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from frontend_svc.protocols.openai.answers import assistant_of, columns_of, tokens_of, usage_of
from launcher.verbs.generation import reason_name
from launcher.vllm_names import nearest
from service_kit.errors import InvalidArgument
from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2

# The call by URL.
OPENAI_URLS: Mapping[str, str] = {"/v1/completions": "generate", "/v1/chat/completions": "chat"}

# OpenAI's default for completions; a chat message has no such limit.
_DEFAULT_COMPLETION_TOKENS = 16

_SAME_NAME = frozenset(
    {"max_tokens", "temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty"}
)
_COMPLETION_FIELDS = _SAME_NAME | {"model", "prompt", "stop", "logprobs"}
_CHAT_FIELDS = _SAME_NAME | {
    "model", "messages", "stop", "logprobs", "top_logprobs", "max_completion_tokens"
}  # fmt: skip
_MESSAGE_FIELDS = ("role", "content", "tool_calls", "name", "tool_call_id")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def from_openai(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of a GenerateRequest or ChatRequest; raises InvalidArgument with the field's name.

    A field that is null counts as unset, as in OpenAI's API.
    """
    given = {name: value for name, value in body.items() if value is not None}
    return _completion(given) if OPENAI_URLS[url] == "generate" else _chat(given)


def to_openai(answer: inference_pb2.GenerateUnaryResponse | chat_pb2.ChatUnaryResponse) -> dict[str, Any]:
    """The response of OpenAI's batch API for an answer."""
    is_chat = isinstance(answer, chat_pb2.ChatUnaryResponse)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{answer.started.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": answer.started.model,
        "choices": [_choice(output) for output in answer.outputs],
        "usage": usage_of(answer.usage),
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
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        content = {"content": tokens_of(output.logprobs)} if has_logprobs else None
        choice |= {"message": message, "logprobs": content}
    # OpenAI has no reason for an output that repeats itself; it is an end by the server, too.
    return choice | {"finish_reason": "stop" if reason == "repetition" else reason}


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {"model": body.get("model", "")}
    sampling: dict[str, Any] = {"max_tokens": _DEFAULT_COMPLETION_TOKENS}
    for name, value in body.items():
        if name == "prompt":
            request |= _prompt(value)
        elif name == "logprobs":
            sampling["logprobs"] = value
        elif name != "model":
            sampling |= _sampling_field(name, value, _COMPLETION_FIELDS)
    if "prompt" not in body:
        raise InvalidArgument("prompt is missing", field="prompt")
    return {**request, "sampling": sampling}


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise InvalidArgument(
            "give either max_tokens or max_completion_tokens, not both", field="max_completion_tokens"
        )
    request: dict[str, Any] = {"model": body.get("model", "")}
    sampling: dict[str, Any] = {}
    for name, value in body.items():
        if name == "messages":
            request["messages"] = _each(value, "messages", _message)
        elif name == "max_completion_tokens":
            sampling["max_tokens"] = value
        elif name == "logprobs":
            sampling |= _chat_logprobs(value, body.get("top_logprobs", 0))
        elif name == "top_logprobs":
            _check(body.get("logprobs") is True, name, "needs logprobs to be true")
        elif name != "model":
            sampling |= _sampling_field(name, value, _CHAT_FIELDS)
    if "messages" not in body:
        raise InvalidArgument("messages is missing", field="messages")
    return {**request, "sampling": sampling}


def _sampling_field(name: str, value: Any, known: Collection[str]) -> dict[str, Any]:
    if name in _SAME_NAME:
        return {name: value}
    if name == "stop":
        return {"stop": [value] if isinstance(value, str) else value}
    raise InvalidArgument(f"{name} is not served{nearest(name, known)}", field=name)


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"prompt": value}
    is_ids = isinstance(value, list) and all(isinstance(each, int) for each in value)
    _check(is_ids, "prompt", "is neither a text nor a list of ids; a line has one prompt")
    return {"token_ids": {"ids": value}}


def _chat_logprobs(wanted: Any, top: Any) -> dict[str, Any]:
    _check(isinstance(wanted, bool), "logprobs", "is not true or false")
    return {"logprobs": top} if wanted else {}


def _message(message: Any, field: str) -> dict[str, Any]:
    _check(isinstance(message, dict), field, "is not an object")
    given = {name: value for name, value in message.items() if value is not None}
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name == "role":
            _check(
                str(value) in _ROLES, f"{field}.role", f"{value!r} is not one of {', '.join(sorted(_ROLES))}"
            )
            made["role"] = f"CHAT_ROLE_{value.upper()}"
        elif name == "content":
            made["parts"] = _parts(value, f"{field}.content")
        elif name == "tool_calls":
            made["tool_calls"] = _tool_calls(value, f"{field}.tool_calls")
        elif name in ("name", "tool_call_id"):
            made[name] = value
        else:
            hint = nearest(name, _MESSAGE_FIELDS)
            raise InvalidArgument(f"{name} is not served{hint}", field=f"{field}.{name}")
    _check("role" in made, f"{field}.role", "is missing")
    return made


def _parts(content: Any, field: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"text": content}]
    return _each(content, field, _part)


def _part(part: Any, field: str) -> dict[str, Any]:
    is_text = isinstance(part, dict) and part.get("type") == "text" and part.keys() == {"type", "text"}
    _check(is_text, field, "is no text part; other parts are not served")
    return {"text": part["text"]}


def _tool_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    made = _each(calls, field, _tool_call)
    return [{"index": index, **call} for index, call in enumerate(made)]


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, dict) else None
    _check(isinstance(function, dict), field, "has no function")
    return {
        "id": call.get("id", ""),
        "name": function.get("name", ""),
        "arguments_json": function.get("arguments", ""),
    }


def _each(values: Any, field: str, convert: Callable[[Any, str], dict[str, Any]]) -> list[dict[str, Any]]:
    _check(isinstance(values, list), field, "is not a list")
    return [convert(value, f"{field}[{index}]") for index, value in enumerate(values)]


def _check(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise InvalidArgument(f"{field} {problem}", field=field)
