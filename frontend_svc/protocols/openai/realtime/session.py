"""A session of the Realtime API: the events of a client in turn, and one response at a time beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from frontend_svc.generation.answers.chat import ChatAnswers
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.open_requests import OpenRequests
from frontend_svc.protocols.openai.bodies import IgnoredFields, Message, encode, read_object
from frontend_svc.protocols.openai.body_reader import BodyReader
from frontend_svc.protocols.openai.call import faults_as_incidents
from frontend_svc.protocols.openai.errors import error_body
from frontend_svc.protocols.openai.field_names import NameOf, in_turn
from frontend_svc.protocols.openai.realtime.bodies import (
    REFUSED_EVENTS,
    ItemCreate,
    ItemNamed,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionChange,
    SessionFields,
    SessionUpdate,
    check_values,
    envelope_of,
    merged,
    response_body,
    shown,
)
from frontend_svc.protocols.openai.realtime.conversation import (
    MAX_SUM_BYTES,
    Conversation,
    ConversationLimits,
    Item,
    as_input,
    read_item,
)
from frontend_svc.protocols.openai.realtime.response import RealtimeResponse
from frontend_svc.protocols.openai.requests import chat_names, chat_request
from frontend_svc.protocols.openai.response_events import Event
from frontend_svc.protocols.openai.response_items import ItemMessage, add_item
from frontend_svc.protocols.openai.responses import chat_of, names_of
from frontend_svc.protocols.openai.websocket import CloseCode, WebSocket, WebSocketClosed
from triptych.api.v1 import chat_message_pb2
from triptych_kit.call_turns import CallTurns
from triptych_kit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ServiceError,
    Unimplemented,
    with_fields,
)
from triptych_kit.shares import LimitPart, SharedLimit

logger = logging.getLogger(__name__)

_REFERENCE = "item_reference"


@dataclass(frozen=True, slots=True)
class RealtimeLimits:
    max_sessions: int = 64  # open ones of an account; 0: none is served
    idle_s: float = 600.0  # without an event of the client and without a response
    session_s: float = 3600.0
    conversation: ConversationLimits = field(default_factory=ConversationLimits)


@dataclass(frozen=True, slots=True)
class SessionServices:
    """Services and limits of all sessions. account, weight: whose share of them a session uses.

    heartbeat_s: time between two pings; 0: there are none.  held: the bytes of their conversations.
    """

    chat: ChatAnswers
    requests: OpenRequests
    bodies: BodyReader
    turns: CallTurns
    limits: RealtimeLimits
    heartbeat_s: float = 0.0
    held: SharedLimit = field(default_factory=lambda: SharedLimit(MAX_SUM_BYTES))
    account: str = ""
    weight: int = 1


@dataclass(slots=True)
class _Running:
    response: RealtimeResponse
    is_cancelled: bool = False


class _SessionEnd(Exception):
    """The service ends the session, for the reason of `error`."""

    def __init__(self, error: ServiceError) -> None:
        self.error = error


class Session:
    """One WebSocket. Its requests are one job, of the session's id."""

    def __init__(self, websocket: WebSocket, services: SessionServices, model: str, caller: Caller) -> None:
        self.id = f"sess_{secrets.token_hex(12)}"
        self._websocket, self._services = websocket, services
        self._model, self._caller = model, caller
        self._fields = SessionFields()
        held = LimitPart(services.held, services.account, services.weight)
        self._conversation = Conversation(services.limits.conversation, held)
        self._running: _Running | None = None
        self._responding: asyncio.Task[None] | None = None
        self._num_events = self._num_responses = 0
        now = asyncio.get_running_loop().time()
        self._ends_at, self._active_at = now + services.limits.session_s, now
        self._expires_at = int(time.time() + services.limits.session_s)
        self._handlers: dict[str, tuple[Any, Callable[[Any], Awaitable[None]]]] = {
            "session.update": (SessionUpdate, self._update),
            "conversation.item.create": (ItemCreate, self._create_item),
            "conversation.item.delete": (ItemNamed, self._delete_item),
            "conversation.item.retrieve": (ItemNamed, self._retrieve_item),
            "response.create": (ResponseCreate, self._create_response),
            "response.cancel": (ResponseCancel, self._cancel_response),
        }

    async def run(self) -> None:
        """Serve the session until it ends; then its WebSocket is closed."""
        code: int = CloseCode.INTERNAL
        reason = "the service has failed"
        try:
            await self._emit({"type": "session.created", "session": self._shown()})
            while True:
                await self._handle(await self._receive())
        except WebSocketClosed as closed:
            code, reason = closed.code, closed.reason
        except _SessionEnd as end:
            code, reason = CloseCode.GOING_AWAY, end.error.message
            with contextlib.suppress(WebSocketClosed):
                await self._emit_error(end.error, None)
        finally:
            if self._responding is not None:
                self._responding.cancel()
                await asyncio.wait((self._responding,))
            self._conversation.clear()
            facts = {"session_id": self.id, "close_code": int(code), "num_responses": self._num_responses}
            logger.info("realtime session", extra=facts)
            await self._websocket.close(code, reason)

    async def _receive(self) -> str:
        """The next event. Raises _SessionEnd where there is none in time."""
        loop = asyncio.get_running_loop()
        heartbeat_s = self._services.heartbeat_s or math.inf
        ping_at = loop.time() + heartbeat_s
        while True:
            try:
                async with asyncio.timeout_at(min(ping_at, self._next_check_at(loop.time()))):
                    text = await self._websocket.receive()
            except TimeoutError:
                self._check_time(loop.time())
            else:
                self._active_at = loop.time()
                return text
            if loop.time() >= ping_at:
                # Proxies cut a connection that is silent.
                await self._websocket.ping()
                ping_at = loop.time() + heartbeat_s

    def _next_check_at(self, now: float) -> float:
        idle_since = self._active_at if self._running is None else now
        return min(self._ends_at, idle_since + self._services.limits.idle_s)

    def _check_time(self, now: float) -> None:
        limits = self._services.limits
        if now >= self._ends_at:
            text = f"the session has lasted for {limits.session_s:.0f} s, which is the limit"
            raise _SessionEnd(DeadlineExceeded(text, reason="SESSION_EXPIRED"))
        if self._running is None and now - self._active_at >= limits.idle_s:
            text = f"the session was idle for {limits.idle_s:.0f} s, which is the limit"
            raise _SessionEnd(DeadlineExceeded(text, reason="SESSION_IDLE"))

    async def _handle(self, text: str) -> None:
        event_id = None
        try:
            with faults_as_incidents(WebSocketClosed):
                services, content = self._services, text.encode()
                await services.turns.begin(services.account, services.weight)
                envelope = envelope_of(content)
                event_id = envelope.event_id
                kind, handle = self._handler_of(envelope.type)
                event, _ = await services.bodies.read_message(
                    content, kind, services.account, services.weight
                )
                await handle(event)
        except ServiceError as error:
            await self._emit_error(error, event_id)

    def _handler_of(self, kind: str) -> tuple[Any, Callable[[Any], Awaitable[None]]]:
        if reason := REFUSED_EVENTS.get(kind):
            raise Unimplemented(f"{kind} is not served: {reason}", metadata={"field": "type"})
        if kind not in self._handlers:
            served = ", ".join(self._handlers)
            raise InvalidArgument(f"type is {kind!r:.80}, must be one of {served}", field="type")
        return self._handlers[kind]

    async def _update(self, event: SessionUpdate) -> None:
        change, _ = self._object(event.session, SessionChange, "session")
        check_values(change, "session")
        if change.model not in (None, self._model):
            raise FailedPrecondition(
                f"session.model is {change.model!r:.80}, and a session keeps its model {self._model!r}",
                metadata={"field": "session.model"},
            )
        fields = merged(self._fields, change)
        body = response_body(self._model, fields)
        try:
            chat_request(chat_of(body, [], self._ignored()), self._ignored(), chat_names())
        except ServiceError as error:
            raise with_fields(error, lambda path: f"session.{names_of(body, ())(path)}") from error
        self._fields = fields
        await self._emit({"type": "session.updated", "session": self._shown()})

    async def _create_item(self, event: ItemCreate) -> None:
        item = read_item(event.item, self._ignored(), "item")
        previous = self._conversation.create(item, event.previous_item_id)
        for what in ("added", "done"):
            named = {"previous_item_id": previous, "item": item}
            await self._emit({"type": f"conversation.item.{what}", **named})

    async def _delete_item(self, event: ItemNamed) -> None:
        self._conversation.delete(event.item_id)
        await self._emit({"type": "conversation.item.deleted", "item_id": event.item_id})

    async def _retrieve_item(self, event: ItemNamed) -> None:
        item = self._conversation.get(event.item_id)
        await self._emit({"type": "conversation.item.retrieved", "item": item})

    async def _create_response(self, event: ResponseCreate) -> None:
        if self._running is not None:
            raise FailedPrecondition(
                f"response {self._running.response.id} is in progress: wait for its end or cancel it",
                reason="CONVERSATION_ALREADY_HAS_ACTIVE_RESPONSE",
            )
        own, _ = self._object(event.response or {}, ResponseFields, "response")
        check_values(own, "response")
        fields = merged(self._fields, own)
        chat, name_of = self._chat(own, fields)
        conversation = None if own.conversation == "none" else self._conversation
        if conversation is not None:
            conversation.check_room()
        limit = fields.max_output_tokens or "inf"
        echo = {"max_output_tokens": limit, "metadata": own.metadata}
        response = RealtimeResponse(self._model, conversation, echo)
        chat.request_id, chat.job_id = response.id, self.id
        if self._responding is not None:
            # It has ended, but for the writing of its last event.
            await asyncio.wait((self._responding,))
        self._num_responses += 1
        self._running = _Running(response)
        self._responding = asyncio.create_task(self._respond(self._running, chat, name_of, event.event_id))

    async def _cancel_response(self, event: ResponseCancel) -> None:
        running = self._running
        if running is None or event.response_id not in (None, running.response.id):
            which = f"response {event.response_id!r:.80}" if event.response_id else "no response"
            raise FailedPrecondition(
                f"{which} is {'not ' if event.response_id else ''}in progress",
                reason="RESPONSE_CANCEL_NOT_ACTIVE",
            )
        running.is_cancelled = True
        with contextlib.suppress(NotFound):
            self._services.requests.abort(running.response.id, tenant=self._caller.identity.tenant)

    async def _respond(
        self, running: _Running, chat: chat_message_pb2.ChatRequest, name_of: NameOf, event_id: str | None
    ) -> None:
        response = running.response
        with contextlib.suppress(WebSocketClosed):
            await self._emit(response.created())
            async with contextlib.aclosing(self._events_of(running, chat, name_of, event_id)) as events:
                async for event in events:
                    await self._emit(event)

    async def _events_of(
        self, running: _Running, chat: chat_message_pb2.ChatRequest, name_of: NameOf, event_id: str | None
    ) -> AsyncGenerator[Event, None]:
        response = running.response
        try:
            if running.is_cancelled:
                ends = response.cancel()
            else:
                stream = self._services.chat.stream(chat, self._caller)
                with faults_as_incidents():
                    async with contextlib.aclosing(stream) as parts:
                        async for part in parts:
                            for event in self._noted(response, response.advance(part)):
                                yield event
                return
        except ServiceError as error:
            if response.has_ended:
                return
            named = with_fields(error, name_of)
            ends = [self._error_event(named, event_id), *response.fail(named)]
        for event in self._noted(response, ends):
            yield event

    def _noted(self, response: RealtimeResponse, events: list[Event]) -> list[Event]:
        if response.has_ended:
            # Before the client knows of the end: its next event may be another response.
            self._running = None
            self._active_at = asyncio.get_running_loop().time()
        return events

    def _chat(
        self, own: ResponseFields, fields: SessionFields
    ) -> tuple[chat_message_pb2.ChatRequest, NameOf]:
        """The chat of a response, and the names of its fields."""
        body, ignored = response_body(self._model, fields), self._ignored()
        messages: list[ItemMessage] = []
        if body.instructions:
            messages.append(ItemMessage(Message("system", body.instructions), "instructions"))
        for item, at in self._inputs(own, ignored):
            add_item(messages, as_input(item), ignored, at)
        name_in_body = names_of(body, [each.field for each in messages])

        def named(path: str) -> str:
            field = name_in_body(path)
            name = field.partition(".")[0].partition("[")[0]
            if name == "input":
                return "conversation" if own.input is None else "response.input"
            if name not in SessionFields.__struct_fields__:
                return field
            return f"{'session' if getattr(own, name) is None else 'response'}.{field}"

        names = chat_names()
        try:
            chat = chat_of(body, [each.message for each in messages], ignored)
            return chat_request(chat, ignored, names), in_turn(names, named)
        except ServiceError as error:
            raise with_fields(error, named) from error

    def _inputs(self, own: ResponseFields, ignored: IgnoredFields) -> list[tuple[Item, str]]:
        """The items that a response answers, each with its field."""
        if own.input is None:
            return [(item, f"conversation[{index}]") for index, item in enumerate(self._conversation)]
        items = []
        for index, raw in enumerate(own.input):
            at = f"response.input[{index}]"
            if raw.get("type") == _REFERENCE:
                item = self._conversation.get(str(raw.get("id", "")), f"{at}.id")
            else:
                item = read_item(raw, ignored, at)
            items.append((item, at))
        return items

    def _object(self, record: dict[str, Any], kind: type[Any], at: str) -> tuple[Any, IgnoredFields]:
        return read_object(record, kind, takes_unknown=self._services.bodies.takes_unknown, at=at)

    def _ignored(self) -> IgnoredFields:
        return IgnoredFields(takes_unknown=self._services.bodies.takes_unknown)

    def _shown(self) -> dict[str, Any]:
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self._model,
            "expires_at": self._expires_at,
            **shown(self._fields),
        }

    def _error_event(self, error: ServiceError, event_id: str | None) -> Event:
        return {"type": "error", "error": {**error_body(error)["error"], "event_id": event_id}}

    async def _emit_error(self, error: ServiceError, event_id: str | None) -> None:
        await self._emit(self._error_event(error, event_id))

    async def _emit(self, event: Event) -> None:
        self._num_events += 1
        named = {"event_id": f"event_{self.id.removeprefix('sess_')}{self._num_events:06d}", **event}
        await self._websocket.send(encode(named).decode())
