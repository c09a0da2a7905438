"""What may be said about any call, and how options by name become fields of a message. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)


class CallOptions(TypedDict, total=False):
    """What may be said about every call; nothing of it is in the request.

    `timeout_s` is the deadline of the whole call with all its attempts, at which the server aborts the
    request; left out or None is none. `metadata` goes along as headers, e.g. `traceparent` and
    `x-request-id`.
    """

    timeout_s: float | None
    metadata: Mapping[str, str]


class ModelOptions(CallOptions, total=False):
    """Options of a call about one model; without `model` the only one that is served."""

    model: str


CALL_OPTION_NAMES = frozenset(CallOptions.__annotations__)


def metadata_pairs(options: CallOptions) -> list[tuple[str, str]]:
    """The metadata as gRPC takes it."""
    return list(options.get("metadata", {}).items())


def build_message(
    kind: type[MessageT], fields: Mapping[str, object], options: Mapping[str, object]
) -> MessageT:
    """A message with `fields` and, by their names, `options` except those of the call.

    A name that the message does not have is a TypeError; values are the server's to judge.
    """
    given = {**fields, **{name: value for name, value in options.items() if name not in CALL_OPTION_NAMES}}
    check_names(given, kind.DESCRIPTOR.fields_by_name, kind.DESCRIPTOR.name)
    # The stubs type each field, which one dictionary of them cannot show; protobuf checks as it sets.
    return kind(**given)


def check_names(given: Mapping[str, object], known: Sequence[str] | Mapping[str, object], what: str) -> None:
    """Raise TypeError for the first name that is not known."""
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no option {name!r}")
