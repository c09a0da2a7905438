"""The page /ui: its static files, and its playground, whose requests take the path of those over gRPC."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import json_format

from frontend_svc.generation.answers.chat import ChatAnswers
from frontend_svc.generation.answers.generate import GenerateAnswers
from frontend_svc.generation.caller import LOCAL_CALLER, Caller
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych_kit.errors import InvalidArgument, ServiceError
from triptych_kit.http.pages import MakePage, Page, TakeBody

RequestT = TypeVar("RequestT", generate_pb2.GenerateRequest, chat_message_pb2.ChatRequest)

_FOLDER = Path(__file__).parent / "static"
_CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class About:
    """What the page's commands need to reach this frontend.

    address: of the public API over gRPC.  http_address: of OpenAI's API, empty where it is not served.
    """

    address: str
    http_address: str
    has_tls: bool
    needs_key: bool


def ui_pages(about: Callable[[], About]) -> dict[str, MakePage]:
    """The static files, and `about` this frontend."""

    async def about_page(target: str) -> Page:
        return Page(json.dumps(asdict(about())).encode(), "application/json")

    pages: dict[str, MakePage] = {"/ui/about": about_page}
    for file in sorted(_FOLDER.iterdir()):
        content_type = f"{_CONTENT_TYPES[file.suffix]}; charset=utf-8"
        pages[f"/ui/{file.name}"] = _static(Page(file.read_bytes(), content_type))
    pages["/ui"] = pages["/ui/"] = pages.pop("/ui/index.html")
    return pages


def ui_posts(generate: GenerateAnswers, chat: ChatAnswers) -> dict[str, TakeBody]:
    """The playground. A body is the JSON of a request; an answer is a line of JSON for each response.

    A line has `at_ms` since the request arrived, and `response` or, as the last one, `error`.
    """

    async def generate_(body: bytes) -> Page:
        return Page(_lines(body, generate_pb2.GenerateRequest, generate.stream), "application/x-ndjson")

    async def chat_(body: bytes) -> Page:
        return Page(_lines(body, chat_message_pb2.ChatRequest, chat.stream), "application/x-ndjson")

    return {"/ui/generate": generate_, "/ui/chat": chat_}


def _static(page: Page) -> MakePage:
    async def make(target: str) -> Page:
        return page

    return make


async def _lines(
    body: bytes, kind: type[RequestT], stream_of: Callable[[RequestT, Caller], AsyncGenerator[Any, None]]
) -> AsyncGenerator[bytes, None]:
    line = functools.partial(_line, time.monotonic())
    try:
        request = _parsed(body, kind)
        async with contextlib.aclosing(stream_of(request, LOCAL_CALLER)) as responses:
            async for response in responses:
                yield line(response=json_format.MessageToDict(response, preserving_proto_field_name=True))
    except ServiceError as error:
        yield line(error=_shown(error))


def _parsed(body: bytes, kind: type[RequestT]) -> RequestT:
    try:
        request = json_format.Parse(body, kind())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(str(error)) from error
    if not request.request_id:
        # Known before the answer begins: the page finds its request among those that wait.
        request.request_id = f"ui-{secrets.token_hex(4)}"
    return request


def _shown(error: ServiceError) -> dict[str, Any]:
    shown: dict[str, Any] = {"code": error.code.name, "reason": error.reason, "message": error.message}
    if isinstance(error, InvalidArgument):
        shown["fields"] = [field for field, _ in error.violations]
    if error.retry_after_ms is not None:
        shown["retry_after_ms"] = error.retry_after_ms
    return shown


def _line(started_at: float, **content: Any) -> bytes:
    at_ms = round((time.monotonic() - started_at) * 1000, 2)
    return json.dumps({"at_ms": at_ms, **content}).encode() + b"\n"
