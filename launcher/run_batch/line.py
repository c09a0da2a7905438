"""A line of a batch: parsed to a request or an error, and its result line. Makes no calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from launcher.run_batch.openai import OPENAI_URLS, from_openai
from service_kit.errors import InvalidArgument, ServiceError
from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2

Request = generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest
Answer = inference_pb2.GenerateUnaryResponse | chat_pb2.ChatUnaryResponse

_CALLS: Mapping[str, type[generate_pb2.GenerateRequest] | type[chat_message_pb2.ChatRequest]] = {
    "generate": generate_pb2.GenerateRequest,
    "chat": chat_message_pb2.ChatRequest,
}
_OWN_KEYS = frozenset({"custom_id", "call", "body"})
_OPENAI_KEYS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line by its number from 1; `custom_id` is None if it has no valid one."""

    number: int
    custom_id: str | None
    request: Request | ServiceError


def read_line(number: int, text: bytes, default_model: str) -> BatchLine:
    """Parse a line. An error is returned as its request, not raised."""
    custom_id: str | None = None
    try:
        line = _object(text)
        custom_id = _custom_id(line)
        request = _request(line)
        if not request.model:
            request.model = default_model
        return BatchLine(number, custom_id, request)
    except InvalidArgument as error:
        return BatchLine(number, custom_id, error)


def answer_record(line: BatchLine, answer: Answer) -> dict[str, Any]:
    """The output line for an answer."""
    response = json_format.MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {"custom_id": line.custom_id, "line": line.number, "response": response, "error": None}


def error_record(line: BatchLine, error: ServiceError) -> dict[str, Any]:
    """The output line for an error."""
    violations = error.violations if isinstance(error, InvalidArgument) else []
    shown = {
        "code": error.code.name,
        "message": error.message,
        "violations": [{"field": field, "description": description} for field, description in violations],
    }
    return {"custom_id": line.custom_id, "line": line.number, "response": None, "error": shown}


def _object(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the line is not JSON: {error}", field="line") from error
    if not isinstance(line, dict):
        raise InvalidArgument("the line is not a JSON object", field="line")
    return line


def _custom_id(line: Mapping[str, Any]) -> str:
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidArgument("custom_id is not a text, or an empty one", field="custom_id")
    return custom_id


def _request(line: Mapping[str, Any]) -> Request:
    is_openai = "url" in line
    for key in line:
        if key not in (_OPENAI_KEYS if is_openai else _OWN_KEYS):
            raise InvalidArgument(f"a line has no field {key!r}", field=key)
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidArgument("body is not a JSON object", field="body")
    if is_openai:
        return _from_openai_line(line, body)
    call = line.get("call")
    if not isinstance(call, str) or call not in _CALLS:
        raise InvalidArgument(f"call is {call!r}, not one of {', '.join(_CALLS)}", field="call")
    return _parsed(body, call)


def _from_openai_line(line: Mapping[str, Any], body: Mapping[str, Any]) -> Request:
    url = line["url"]
    if not isinstance(url, str) or url not in OPENAI_URLS:
        raise InvalidArgument(f"url is {url!r}, not one of {', '.join(OPENAI_URLS)}", field="url")
    if line.get("method", "POST") != "POST":
        raise InvalidArgument(f"method is {line['method']!r}, not POST", field="method")
    return _parsed(from_openai(url, body), OPENAI_URLS[url])


def _parsed(body: Mapping[str, Any], call: str) -> Request:
    message = _CALLS[call]()
    try:
        json_format.ParseDict(dict(body), message)
    except (json_format.ParseError, RecursionError) as error:
        raise InvalidArgument(f"body: {error}", field="body") from error
    return message
