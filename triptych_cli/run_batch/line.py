"""A line of a batch: parsed to a request or an error, and its result line. Makes no calls."""

from __future__ import annotations

import json
import re
import reprlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from triptych.api.v1 import chat_message_pb2, chat_pb2, generate_pb2, inference_pb2
from triptych_cli.run_batch.openai import OPENAI_URLS, from_openai, to_openai
from triptych_kit.config import nearest
from triptych_kit.errors import InvalidArgument, ServiceError

Request = generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest
Answer = inference_pb2.GenerateUnaryResponse | chat_pb2.ChatUnaryResponse

_CALLS: Mapping[str, type[generate_pb2.GenerateRequest] | type[chat_message_pb2.ChatRequest]] = {
    "generate": generate_pb2.GenerateRequest,
    "chat": chat_message_pb2.ChatRequest,
}
_TYPES = re.compile(r'Message type "[\w.]+" | at "?[\w.]+"?')
_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
}
_OWN_KEYS = frozenset({"custom_id", "call", "body"})
_OPENAI_KEYS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line by its number from 1; `custom_id` is None if it has no valid one."""

    number: int
    custom_id: str | None
    request: Request | ServiceError
    is_openai: bool = False  # in the form of OpenAI's batch API, as its answer is then


def read_line(number: int, text: bytes, default_model: str) -> BatchLine:
    """Parse a line. An error is returned as its request, not raised."""
    custom_id: str | None = None
    is_openai = False
    try:
        line = _object(text)
        is_openai = "url" in line
        custom_id = _custom_id(line)
        request = _request(line)
        if not request.model:
            request.model = default_model
        return BatchLine(number, custom_id, request, is_openai)
    except InvalidArgument as error:
        return BatchLine(number, custom_id, error, is_openai)


def answer_record(line: BatchLine, answer: Answer) -> dict[str, Any]:
    """The output line for an answer."""
    if line.is_openai:
        response = to_openai(answer)
    else:
        response = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    return {**_head_of(line), "response": response, "error": None}


def error_record(line: BatchLine, error: ServiceError) -> dict[str, Any]:
    """The output line for an error."""
    violations = error.violations if isinstance(error, InvalidArgument) else []
    shown = {
        "code": error.code.name,
        "message": error.message,
        # A single one is described by the message.
        "violations": [
            {"field": field} | ({"description": text} if text != error.message else {})
            for field, text in violations
        ],
    }
    return {**_head_of(line), "response": None, "error": shown}


def _head_of(line: BatchLine) -> dict[str, Any]:
    """The ids of an output line."""
    own = {"id": f"batch_req_{secrets.token_hex(16)}"} if line.is_openai else {}
    return {**own, "custom_id": line.custom_id, "line": line.number}


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
        known = _OPENAI_KEYS if is_openai else _OWN_KEYS
        if key not in known:
            raise InvalidArgument(f"a line has no field {key!r}{nearest(key, known)}", field=key)
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidArgument("body is not a JSON object", field="body")
    if is_openai:
        return _from_openai_line(line, body)
    call = line.get("call")
    if not isinstance(call, str) or call not in _CALLS:
        raise InvalidArgument(
            f"call is {'not set' if call is None else repr(call)}, not one of {', '.join(_CALLS)}",
            field="call",
        )
    return _parsed(body, call)


def _from_openai_line(line: Mapping[str, Any], body: Mapping[str, Any]) -> Request:
    url = line["url"]
    if not isinstance(url, str) or url not in OPENAI_URLS:
        raise InvalidArgument(f"url is {url!r}, not one of {', '.join(OPENAI_URLS)}", field="url")
    if line.get("method", "POST") != "POST":
        raise InvalidArgument(f"method is {line['method']!r}, not POST", field="method")
    return from_openai(url, body)


def _parsed(body: Mapping[str, Any], call: str) -> Request:
    message = _CALLS[call]()
    descriptor: Any = message.DESCRIPTOR
    _check_fields(body, descriptor, "body")
    try:
        json_format.ParseDict(dict(body), message)
    except (json_format.ParseError, RecursionError) as error:
        raise InvalidArgument(f"body: {_TYPES.sub('', str(error)).rstrip('.')}", field="body") from error
    return message


def _check_fields(body: Mapping[str, Any], message: Descriptor, path: str) -> None:
    """Raise InvalidArgument for the first name that is no field, and the first value of another type.

    protobuf's own errors have the names of its types, and not always the path.
    """
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    for key, value in body.items():
        field, field_path = fields.get(key), f"{path}.{key}"
        if field is None:
            hint = nearest(key, [one.name for one in message.fields])
            raise InvalidArgument(f"{path} has no field {key!r}{hint}", field=field_path)
        if value is None:
            continue
        if field.message_type is None:
            _check_value(field, value, field_path)
            continue
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            one_path = f"{field_path}[{index}]" if isinstance(value, list) else field_path
            if not isinstance(one, dict):
                raise InvalidArgument(f"{one_path} must be an object", field=one_path)
            _check_fields(one, field.message_type, one_path)


def _check_value(field: FieldDescriptor, value: Any, path: str) -> None:
    message: Any = field.containing_type
    try:
        json_format.ParseDict({field.name: value}, GetMessageClass(message)())
    except json_format.ParseError as error:
        kind = _KINDS.get(field.cpp_type, "an integer of its range")
        if field.enum_type is not None:
            kind = f"one of {', '.join(field.enum_type.values_by_name)}"
        rule = f"must be a list, each {kind}" if field.is_repeated else f"must be {kind}"
        raise InvalidArgument(f"{path} is {reprlib.repr(value)}, {rule}", field=path) from error
