"""Fields of a body that are not served: taken, refused, or refused with a suggestion."""

from __future__ import annotations

from typing import Any

import pytest

from frontend_svc.protocols.openai.bodies import Base, ChatBody, CompletionBody, read_object
from frontend_svc.protocols.openai.fields import Refusal
from frontend_svc.protocols.openai.responses import ResponseBody
from triptych_kit.errors import InvalidArgument, Unimplemented

BODIES: dict[type[Base], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"prompt": "x"},
    ResponseBody: {"input": "x"},
}
REFUSED = [(kind, name, refusal) for kind in BODIES for name, refusal in kind.refused.items()]


@pytest.mark.parametrize("kind", BODIES)
def test_fields_without_an_effect_are_named(kind: type[Base]) -> None:
    _, ignored = read_object({**BODIES[kind], **dict.fromkeys(kind.ignored, "a")}, kind)
    assert {"client_metadata", "service_tier", "user"} <= set(ignored) == kind.ignored


@pytest.mark.parametrize(("kind", "name", "refusal"), REFUSED)
def test_a_field_is_refused_unless_its_value_asks_for_nothing(
    kind: type[Base], name: str, refusal: Refusal
) -> None:
    for value in (*refusal.idle, False, [], ""):
        assert read_object({**BODIES[kind], name: value}, kind)[1] == []
    for value in ({}, ["audio"], "x", True if 1 not in refusal.idle else 2):
        with pytest.raises(Unimplemented, match=f"{name} is not served: "):
            read_object({**BODIES[kind], name: value}, kind)


@pytest.mark.parametrize("takes_unknown", [False, True])
@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("topP", "top_p"), ("maxTokens", "max_tokens")]
)
def test_a_served_field_with_a_mistake_is_refused(name: str, near: str, *, takes_unknown: bool) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} is not served; did you mean {near}\\?$"):
        read_object({**BODIES[ChatBody], name: 1}, ChatBody, takes_unknown=takes_unknown)


def test_unknown_fields_are_taken_where_that_is_chosen() -> None:
    message = {"role": "user", "content": "x", "mood": "good", "title": None}
    body = {"messages": [message], "session": "s", "stream_options": {"include_usage": True, "x": 1}}
    with pytest.raises(InvalidArgument, match="is not served"):
        read_object(body, ChatBody)
    read, ignored = read_object(body, ChatBody, takes_unknown=True)
    assert sorted(ignored) == ["messages[0].mood", "session", "stream_options.x"]
    assert read.messages[0].content == "x"
    assert read.stream_options is not None
    assert read.stream_options.include_usage


def test_unknown_fields_are_taken_up_to_a_number() -> None:
    body = {**BODIES[ChatBody], **{f"field{index}": 1 for index in range(1000)}}
    with pytest.raises(InvalidArgument, match="field64 is not served"):
        read_object(body, ChatBody, takes_unknown=True)
