"""The events that clients of the Realtime API send. Types alone are checked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from frontend_svc.protocols.openai.bodies import SAME_SAMPLING, Base, SameSampling, ToolChoice
from frontend_svc.protocols.openai.fields import (
    IGNORED_IN_SESSIONS,
    REFUSED_IN_SESSIONS,
    Refusal,
)
from frontend_svc.protocols.openai.responses import Reasoning, ResponseBody
from triptych_kit.errors import InvalidArgument, Unimplemented

# Fields that a session and the body of a response have in common.
_SAME_IN_RESPONSES = (
    *SAME_SAMPLING, "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning", "seed",
)  # fmt: skip
# Fields that a session shows whether or not they are set.
_SHOWN: Mapping[str, Any] = {
    "instructions": "", "max_output_tokens": "inf", "tools": [], "tool_choice": "auto", "tracing": None,
}  # fmt: skip
_AUDIO = "there is no audio"
REFUSED_EVENTS = {
    "conversation.item.truncate": _AUDIO,
    "input_audio_buffer.append": _AUDIO,
    "input_audio_buffer.clear": _AUDIO,
    "input_audio_buffer.commit": _AUDIO,
    "output_audio_buffer.clear": _AUDIO,
    "transcription_session.update": _AUDIO,
}


class Envelope(msgspec.Struct):
    """The fields of every event. Others are passed over."""

    type: str
    event_id: str | None = None


class SessionFields(SameSampling, kw_only=True):
    """Settings of a session for its responses, or of one response. `seed` and sampling are vLLM's."""

    ignored: ClassVar[frozenset[str]] = IGNORED_IN_SESSIONS
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_IN_SESSIONS

    instructions: str | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    output_modalities: list[str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    seed: int | None = None
    tool_choice: ToolChoice | None = None
    tools: list[dict[str, Any]] | None = None


class SessionChange(SessionFields, kw_only=True):
    type: str | None = None
    model: str | None = None
    truncation: str | dict[str, Any] | None = None


class ResponseFields(SessionFields, kw_only=True):
    conversation: Literal["auto", "none"] | None = None
    input: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class _Event(Base, kw_only=True):
    type: str
    event_id: str | None = None


class SessionUpdate(_Event, kw_only=True):
    session: dict[str, Any]


class ItemCreate(_Event, kw_only=True):
    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemNamed(_Event, kw_only=True):
    """Of an event about an item of the conversation."""

    item_id: str


class ResponseCreate(_Event, kw_only=True):
    response: dict[str, Any] | None = None


class ResponseCancel(_Event, kw_only=True):
    response_id: str | None = None


def envelope_of(content: bytes) -> Envelope:
    """Raises InvalidArgument unless it is the JSON of an event."""
    try:
        return msgspec.json.decode(content, type=Envelope)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"the event is not a JSON object with a type: {error}", field="type") from error


def check_values(fields: SessionFields, at: str) -> None:
    """Raise Unimplemented for values that are not served; `at` is the field with the fields."""
    if (fields.output_modalities or ["text"]) != ["text"]:
        raise _not_served(f"{at}.output_modalities", "must be ['text']: there is no audio")
    if not isinstance(fields, SessionChange):
        return
    if fields.type not in (None, "realtime"):
        raise _not_served(f"{at}.type", f"is {fields.type!r:.40}, must be 'realtime': there is no audio")
    if fields.truncation not in (None, "disabled"):
        raise _not_served(f"{at}.truncation", "must be 'disabled': conversations are not shortened")


def merged(session: SessionFields, own: SessionFields) -> SessionFields:
    """The fields of `session`, and in their place those that `own` sets."""
    names = SessionFields.__struct_fields__
    return SessionFields(
        **{name: getattr(session if getattr(own, name) is None else own, name) for name in names}
    )


def response_body(model: str, fields: SessionFields) -> ResponseBody:
    """The body of the same response in the Responses API, without its input."""
    same = {name: getattr(fields, name) for name in _SAME_IN_RESPONSES}
    limit = None if fields.max_output_tokens == "inf" else fields.max_output_tokens
    return ResponseBody(model=model, input=[], max_output_tokens=limit, **same)


def shown(fields: SessionFields) -> dict[str, Any]:
    """The fields of a session as its events show them."""
    own = {name: value for name, value in msgspec.to_builtins(fields).items() if value is not None}
    return {**_SHOWN, **own, "output_modalities": ["text"], "truncation": "disabled"}


def _not_served(field: str, text: str) -> Unimplemented:
    return Unimplemented(f"{field} {text}", metadata={"field": field})
