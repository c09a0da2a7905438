"""The events of one response of a session, made of those of the Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from frontend_svc.protocols.openai.errors import error_body
from frontend_svc.protocols.openai.realtime.conversation import Conversation, Item
from frontend_svc.protocols.openai.response_events import LAST_EVENTS, Event, GrowingResponse
from triptych.api.v1 import chat_message_pb2
from triptych_kit.errors import ServiceError

# Fields of events that the Realtime API does not have.
_LEFT_OUT = frozenset({"sequence_number", "logprobs"})
# The client knows of the response before the engine does.
_BEGINNINGS = frozenset({"response.created", "response.in_progress"})
_CANCELLED = {"type": "cancelled", "reason": "client_cancelled"}


class RealtimeResponse:
    """conversation: the one that its items are added to, if there is one.  echo: fields that it repeats."""

    def __init__(self, model: str, conversation: Conversation | None, echo: Mapping[str, Any]) -> None:
        self.id = f"resp_{secrets.token_hex(24)}"
        self.has_ended = False
        self._growing = GrowingResponse(self.id, {"model": model}, with_ids=False)
        self._conversation, self._echo = conversation, echo
        self._call_ids: dict[str, str] = {}  # by item

    def created(self) -> Event:
        return {"type": "response.created", "response": self._shown(self._growing.body(), None)}

    def advance(self, response: chat_message_pb2.ChatResponse) -> list[Event]:
        """The events of a part of the answer. Its reasoning is left out: there are no events for it."""
        kind = response.WhichOneof("event")
        if kind == "started":
            return self._events(self._growing.start(response.started))
        if kind == "delta":
            response.delta.ClearField("reasoning")
            return self._events(self._growing.advance(response.delta))
        return self._events(self._growing.finish(response.finished, response.finished.usage))

    def fail(self, error: ServiceError) -> list[Event]:
        shown = error_body(error)["error"]
        details = {name: shown[name] for name in ("type", "code", "message")}
        return self._events(self._growing.fail(error), {"type": "failed", "error": details})

    def cancel(self) -> list[Event]:
        """The end of one that was cancelled before it was begun."""
        return self._events(self._growing.cancel())

    def _events(self, events: Iterable[Event], details: dict[str, Any] | None = None) -> list[Event]:
        return [one for event in events for one in self._translated(event, details)]

    def _translated(self, event: Event, details: dict[str, Any] | None) -> list[Event]:
        name = event["type"]
        if name in _BEGINNINGS:
            return []
        if name in LAST_EVENTS:
            self.has_ended = True
            response = event["response"]
            return [
                {"type": "response.done", "response": self._shown(response, details or _details(response))}
            ]
        own = {key: value for key, value in event.items() if key not in _LEFT_OUT}
        own["response_id"] = self.id
        if "part" in own:
            own["part"] = {"type": "text", "text": own["part"]["text"]}
        if name.startswith("response.function_call_arguments."):
            own["call_id"] = self._call_ids[own["item_id"]]
        if "item" not in own:
            return [own]
        own["item"] = item = _item(own["item"])
        if name == "response.output_item.added":
            self._call_ids[item["id"]] = item.get("call_id", "")
            return [own, *self._of_conversation("added", item)]
        return [own, *self._of_conversation("done", item)]

    def _of_conversation(self, what: str, item: Item) -> list[Event]:
        conversation = self._conversation
        if conversation is None:
            return []
        previous = conversation.append(item) if what == "added" else conversation.replace(item)
        return [{"type": f"conversation.item.{what}", "previous_item_id": previous, "item": item}]

    def _shown(self, body: Mapping[str, Any], details: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": body["status"],
            "status_details": details,
            "output": [_item(item) for item in body["output"]],
            "conversation_id": None if self._conversation is None else self._conversation.id,
            "output_modalities": ["text"],
            **self._echo,
            "usage": _usage(body["usage"]),
        }


def _item(shown: Item) -> Item:
    content = [{"type": part["type"], "text": part["text"]} for part in shown.get("content", ())]
    return {**shown, "object": "realtime.item", **({"content": content} if "content" in shown else {})}


def _details(response: Mapping[str, Any]) -> dict[str, Any] | None:
    if response["status"] == "cancelled":
        return _CANCELLED
    reason = response["incomplete_details"]
    return None if reason is None else {"type": "incomplete", **reason}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    num_input, num_output = usage["input_tokens"], usage["output_tokens"]
    num_cached = usage["input_tokens_details"]["cached_tokens"]
    return {
        "total_tokens": usage["total_tokens"],
        "input_tokens": num_input,
        "output_tokens": num_output,
        "input_token_details": {
            "text_tokens": num_input,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": num_cached,
            "cached_tokens_details": {"text_tokens": num_cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": num_output, "audio_tokens": 0},
    }
