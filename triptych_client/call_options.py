"""Options of every call, and conversion of options by name to message fields. Knows no service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)


class CallOptions(TypedDict, total=False):
    """Options of every call; not part of the request.

    `timeout_s` is the deadline of the whole call including its retries, at which the server aborts the
    request; unset or None means no deadline. `metadata` is sent as headers, e.g. `traceparent` and
    `x-request-id`.
    """

    timeout_s: float | None
    metadata: Mapping[str, str]


class ModelOptions(CallOptions, total=False):
    """Options of a call about one model; an unset `model` means the only one that is served."""

    model: str


CALL_OPTION_NAMES = frozenset(CallOptions.__annotations__)


def metadata_pairs(options: CallOptions) -> list[tuple[str, str]]:
    return list(options.get("metadata", {}).items())


def build_message(
    kind: type[MessageT], fields: Mapping[str, object], options: Mapping[str, object]
) -> MessageT:
    """A message with `fields` and, by their names, `options` except those of the call.

    Raises TypeError for a name that the message does not have. The server checks the values.
    """
    given = {**fields, **{name: value for name, value in options.items() if name not in CALL_OPTION_NAMES}}
    check_names(given, kind.DESCRIPTOR.fields_by_name, kind.DESCRIPTOR.name)
    # The field types cannot be expressed for a dictionary; protobuf checks them at run time.
    return kind(**given)


def check_names(given: Mapping[str, object], known: Sequence[str] | Mapping[str, object], what: str) -> None:
    """Raise TypeError for the first unknown name."""
    for name in given:
        if name not in known:
            raise TypeError(f"{what} has no option {name!r}")
