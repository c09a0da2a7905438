"""OpenAI's Responses API: each response is a chat, whose conversation may be continued by its id."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend_svc.generation.answers.chat import ChatAnswers, delta_of
from frontend_svc.generation.answers.tokenizer import TokenizerAnswers
from frontend_svc.generation.open_requests import OpenRequests
from frontend_svc.protocols.openai.bodies import (
    Base,
    ChatBody,
    Function,
    GenerationBody,
    IgnoredFields,
    JSONSchema,
    Message,
    ResponseFormat,
    ToolChoice,
    encode,
    read_part,
)
from frontend_svc.protocols.openai.call import (
    Handler,
    body_of,
    caller_of,
    choose_rank,
    json_response,
    streamed,
    unless_disconnected,
)
from frontend_svc.protocols.openai.field_names import FieldNames, NameOf, in_turn
from frontend_svc.protocols.openai.fields import (
    IGNORED_IN_RESPONSES,
    IGNORED_IN_TOOLS,
    IGNORED_INCLUDES,
    REFUSED_IN_RESPONSES,
    Refusal,
)
from frontend_svc.protocols.openai.requests import (
    chat_names,
    chat_request,
    check_choice,
    check_demand,
    note_unstreamed,
    served_tools,
)
from frontend_svc.protocols.openai.response_events import (
    LAST_EVENTS,
    Event,
    GrowingResponse,
    ResponseStatus,
)
from frontend_svc.protocols.openai.response_items import items_of, messages_of
from frontend_svc.protocols.openai.response_store import ResponseStore, StoredResponse
from triptych.api.v1 import chat_message_pb2
from triptych_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ServiceError,
    Unimplemented,
    with_fields,
)
from triptych_kit.security.identity import current_identity

# How long a call that cancels a response waits for its stream to end.
_CANCEL_LIMIT_S = 2.0
# Items of a page, without and with a limit.
_PAGE_ITEMS = 20
_MAX_PAGE_ITEMS = 100

# Fields that a chat has by the same name.
_SAME_IN_CHAT = (
    *GenerationBody.__struct_fields__, "parallel_tool_calls", "chat_template", "chat_template_kwargs",
)  # fmt: skip
# Fields of the chat's body that this one has elsewhere.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


class TextFormat(Base):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Base):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Base):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_TOOLS

    name: str
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(Base):
    type: Literal["function"]
    name: str


class ResponseBody(GenerationBody, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_RESPONSES
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_RESPONSES

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    # vLLM's, as in chat completions.
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A response that is being generated, and what is kept of it at its end."""

    key: tuple[str, str]  # tenant and id
    response: GrowingResponse
    messages: list[Message]  # of the input
    previous: StoredResponse | None
    is_stored: bool
    ended: asyncio.Event


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a body's chat, and the fields of the body that they are made of."""

    previous: StoredResponse | None
    added: list[Message]
    messages: list[Message]
    name_of: NameOf


class ResponseRoutes:
    """Serves the Responses API over chats. What is stored is in the memory of this process."""

    def __init__(
        self, chat: ChatAnswers, tokenizer: TokenizerAnswers, requests: OpenRequests, store: ResponseStore
    ) -> None:
        self._chat, self._tokenizer = chat, tokenizer
        self._requests, self._store = requests, store
        self._streaming: dict[tuple[str, str], _Turn] = {}
        one = "/v1/responses/{response_id}"
        self.gets: dict[str, Handler] = {one: self._get, f"{one}/input_items": self._input_items}
        self.posts: dict[str, Handler] = {
            "/v1/responses": self._create,
            "/v1/responses/input_tokens": self._input_tokens,
            f"{one}/cancel": self._cancel,
        }
        self.deletes: dict[str, Handler] = {one: self._delete}

    async def _create(self, request: Request) -> Response:
        body, ignored = await body_of(request, ResponseBody)
        ignored.extend(_refuse_values(body))
        owner = current_identity().tenant
        conversation = self._conversation(owner, body, ignored)
        response_id = f"resp_{secrets.token_hex(24)}"
        chat = _request_of(request, body, conversation, ignored)
        chat.request_id = response_id
        with_ids = bool(body.return_token_ids)
        response = GrowingResponse(response_id, _echo_of(body), with_ids=with_ids)
        is_stored = body.store is not False
        added, previous = conversation.added, conversation.previous
        turn = _Turn((owner, response_id), response, added, previous, is_stored, asyncio.Event())
        if body.stream:
            return await streamed(request, self._stream(turn, chat, request), ignored)
        answer = await unless_disconnected(request, self._chat.whole(chat, caller_of(request)))
        response.start(answer.started)
        (output,) = answer.outputs
        response.advance(delta_of(output))
        response.finish(output, answer.usage)
        self._keep(turn)
        return json_response(response.body(), ignored)

    async def _stream(
        self, turn: _Turn, chat: chat_message_pb2.ChatRequest, request: Request
    ) -> AsyncGenerator[bytes, None]:
        response = turn.response
        self._streaming[turn.key] = turn
        try:
            async with contextlib.aclosing(self._chat.stream(chat, caller_of(request))) as responses:
                async for event in _events_of(response, responses, request.state.name_of):
                    if event["type"] in LAST_EVENTS:
                        # Before the client knows of the end: its next call may continue it.
                        del self._streaming[turn.key]
                        self._keep(turn)
                    yield b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"
        finally:
            self._streaming.pop(turn.key, None)
            turn.ended.set()

    async def _input_tokens(self, request: Request) -> Response:
        body, ignored = await body_of(request, ResponseBody)
        ignored.extend(_refuse_values(body))
        conversation = self._conversation(current_identity().tenant, body, ignored)
        chat = _request_of(request, body, conversation, ignored)
        num_tokens = await unless_disconnected(request, self._tokenizer.count(chat))
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens}, ignored)

    async def _input_items(self, request: Request) -> Response:
        key = _key_of(request)
        turn = self._streaming.get(key)
        if turn is None:
            messages = self._store.get(*key).input_messages()
        else:
            before = [] if turn.previous is None else turn.previous.conversation()
            messages = [*before, *turn.messages]
        # An id is the same in every list: clients continue behind the last one that they have.
        own = key[1].removeprefix("resp_")
        items = items_of(messages, lambda prefix, index: f"{prefix}_{own}{index:06d}")
        return json_response(_page_of(items, request.query_params))

    async def _get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise Unimplemented(
                "stream is not served here: create the response as a stream", metadata={"field": "stream"}
            )
        key = _key_of(request)
        if (turn := self._streaming.get(key)) is not None:
            return json_response(turn.response.body())
        return _json(self._store.get(*key).body)

    async def _cancel(self, request: Request) -> Response:
        key = _key_of(request)
        turn = self._streaming.get(key)
        if turn is None:
            # It has ended: there is nothing to cancel.
            return _json(self._store.get(*key).body)
        with contextlib.suppress(NotFound):
            self._requests.abort(turn.response.id, tenant=key[0])
        with contextlib.suppress(TimeoutError):
            # A client that does not read its stream may delay this.
            await asyncio.wait_for(turn.ended.wait(), _CANCEL_LIMIT_S)
        return json_response(turn.response.body())

    async def _delete(self, request: Request) -> Response:
        key = _key_of(request)
        if key in self._streaming:
            raise FailedPrecondition(f"response {key[1]!r} is in progress: cancel it first")
        self._store.delete(*key)
        return json_response({"id": key[1], "object": "response", "deleted": True})

    def _conversation(self, owner: str, body: ResponseBody, ignored: IgnoredFields) -> _Conversation:
        """The conversation that a body continues, and the messages that it adds."""
        previous = self._previous(owner, body.previous_response_id)
        items = messages_of(body.input, ignored)
        first = [] if body.instructions is None else [Message("system", body.instructions)]
        before = [] if previous is None else previous.conversation()
        fields = ["instructions"] * len(first) + ["previous_response_id"] * len(before)
        name_of = names_of(body, fields + [each.field for each in items])
        added = [each.message for each in items]
        return _Conversation(previous, added, [*first, *before, *added], name_of)

    def _previous(self, owner: str, response_id: str | None) -> StoredResponse | None:
        if response_id is None:
            return None
        field = "previous_response_id"
        if (owner, response_id) in self._streaming:
            raise FailedPrecondition(
                f"{field} {response_id!r} is in progress: it can be continued at its end",
                metadata={"field": field},
            )
        return self._store.get(owner, response_id, field)

    def _keep(self, turn: _Turn) -> None:
        """Store a response that has ended with an answer, if the client wants that."""
        response = turn.response
        if not turn.is_stored or response.status is ResponseStatus.FAILED:
            return
        body = response.body()
        answered = [each.message for each in messages_of(body["output"], IgnoredFields(), "output")]
        messages = [*turn.messages, *answered]
        stored = StoredResponse(body, messages, turn.previous, num_inputs=len(turn.messages))
        self._store.add(*turn.key, stored)


async def _events_of(
    response: GrowingResponse,
    responses: AsyncGenerator[chat_message_pb2.ChatResponse, None],
    name_of: NameOf,
) -> AsyncGenerator[Event, None]:
    """The events of a response; an error after the first one is the last one, with fields of the body."""
    has_started = False
    try:
        async for each in responses:
            kind = each.WhichOneof("event")
            if kind == "started":
                events = response.start(each.started)
                has_started = True
            elif kind == "delta":
                events = response.advance(each.delta)
            else:
                events = response.finish(each.finished, each.finished.usage)
            for event in events:
                yield event
    except ServiceError as error:
        if not has_started:
            raise
        for event in response.fail(with_fields(error, name_of)):
            yield event


def _key_of(request: Request) -> tuple[str, str]:
    return current_identity().tenant, request.path_params["response_id"]


def _page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A part of a list, newest first unless `order` is asc: `limit` items behind the one named `after`."""
    limit, order, after = query.get("limit", str(_PAGE_ITEMS)), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit[:4]) <= _MAX_PAGE_ITEMS:
        raise InvalidArgument(f"limit is {limit!r:.20}, must be 1..{_MAX_PAGE_ITEMS}", field="limit")
    if order not in ("asc", "desc"):
        raise InvalidArgument(f"order is {order!r:.20}, must be asc or desc", field="order")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidArgument(f"after is {after!r:.80}, which is no item of this response", field="after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > len(page),
    }


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _refuse_values(body: ResponseBody) -> list[str]:
    """The names of given fields without an effect. Raises Unimplemented for values that are not served."""
    if body.truncation == "auto":
        raise Unimplemented(
            "truncation is 'auto', which is not served: conversations are not shortened",
            metadata={"field": "truncation"},
        )
    if not_served := set(body.include or ()) - IGNORED_INCLUDES:
        raise Unimplemented(
            f"include has {min(not_served)!r:.60}, which is not served", metadata={"field": "include"}
        )
    ignored = ["include"] if body.include else []
    note_unstreamed(body, ignored)
    if body.text is not None and body.text.verbosity is not None:
        ignored.append("text.verbosity")
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        ignored.append("reasoning.summary")
    return ignored


def chat_of(body: ResponseBody, messages: list[Message], ignored: IgnoredFields) -> ChatBody:
    """The body of the chat that a response is. Names of tools that are left out are added to `ignored`."""
    chat = ChatBody(messages=messages, **{name: getattr(body, name) for name in _SAME_IN_CHAT})
    chat.max_completion_tokens = body.max_output_tokens
    chat.tools = _tools_of(body.tools, ignored)
    if isinstance(body.tool_choice, dict):
        check_choice(body.tool_choice)
        named = read_part(body.tool_choice, NamedFunctionTool, ignored, "tool_choice")
        chat.tool_choice = {"function": {"name": named.name}}
    else:
        check_demand(body.tools, body.tool_choice or "auto")
        chat.tool_choice = body.tool_choice
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.text is not None and (chosen := body.text.format) is not None:
        schema = JSONSchema(chosen.name, chosen.description, chosen.schema, chosen.strict)
        chat.response_format = ResponseFormat(chosen.type, schema if chosen.type == "json_schema" else None)
    return chat


def _tools_of(raw_tools: list[dict[str, Any]] | None, ignored: IgnoredFields) -> list[dict[str, Any]]:
    """The functions as tools of a chat."""
    tools = []
    for at, raw in served_tools(raw_tools, ignored):
        tool = read_part(raw, FunctionTool, ignored, at)
        function = Function(tool.name, tool.description, tool.parameters, tool.strict)
        tools.append({"function": msgspec.structs.asdict(function)})
    return tools


def _echo_of(body: ResponseBody) -> dict[str, Any]:
    """The fields of its request that a response repeats."""
    format_ = (body.text and body.text.format) or TextFormat("text")
    shown_format: dict[str, Any] = {"type": format_.type}
    if format_.type == "json_schema":
        shown_format |= {"name": format_.name, "schema": format_.schema, "strict": bool(format_.strict)}
    return {
        "model": body.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": shown_format},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": False, "parameters": None, **tool} for _, tool in served_tools(body.tools)],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _request_of(
    request: Request, body: ResponseBody, conversation: _Conversation, ignored: IgnoredFields
) -> chat_message_pb2.ChatRequest:
    """The chat of a body. Errors from here on name fields of the body."""
    request.state.name_of = conversation.name_of
    names = chat_names()
    chat = chat_request(chat_of(body, conversation.messages, ignored), ignored, names)
    request.state.name_of = in_turn(names, conversation.name_of)
    choose_rank(request, [chat])
    return chat


def names_of(body: ResponseBody, fields: Sequence[str]) -> NameOf:
    """Fields of a body by those of its chat's body; `fields` has those of its messages."""
    names = FieldNames(_NAMES)
    for index, field in enumerate(fields):
        names.note_whole(f"messages[{index}]", field)
    for index, (at, _) in enumerate(served_tools(body.tools)):
        names.note(f"tools[{index}]", at)
        names.note(f"tools[{index}].function", at)
    return names
